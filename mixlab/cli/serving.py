"""`mixlab serve`."""

import os
import sys

from jsonargparse import ArgumentParser, Namespace

from mixlab.core.errors import ConfigError

TOKEN_VARIABLE = "MIXLAB_SERVE_TOKEN"
OPTIONS = ("host", "port", "batch", "wait_ms", "device", "timeout", "max_bytes", "max_pixels", "max_images", "queue")


def serve_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="A page and an HTTP interface for trained weights. Example: mixlab serve w.safetensors, then open "
        "http://127.0.0.1:8000, or: curl -F files=@photo.jpg http://127.0.0.1:8000/predict"
    )
    parser.add_argument("weights", help="a .safetensors file with its config inside: classifier, segmenter or detector")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; default: this machine only")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--token", default=None, help=f"clients must send it; else {TOKEN_VARIABLE} of the environment")
    parser.add_argument("--max-bytes", type=int, default=20 * 2**20, help="of a request's body")
    parser.add_argument("--max-pixels", type=int, default=32_000_000, help="of an image")
    parser.add_argument("--max-images", type=int, default=32, help="in a request")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds for a body to arrive, and for the answer")
    parser.add_argument("--queue", type=int, default=1024, help="images that may wait; more are turned away for now")
    parser.add_argument("--batch", type=int, default=16, help="images of classifiers that are computed together")
    parser.add_argument("--wait-ms", type=float, default=4.0, help="how long a batch waits for more images")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, mps or auto")
    return parser


def serve(arguments: Namespace) -> None:
    """Answer requests over HTTP, with a page to try images on."""
    from mixlab.deploy.serve import serve as run

    token = arguments.token if arguments.token is not None else os.environ.get(TOKEN_VARIABLE)
    if not os.path.isfile(arguments.weights):
        raise ConfigError(f"The weight file {arguments.weights} does not exist.")

    def tell(address: str) -> None:
        told = "" if token is None else ", token needed"
        print(f"Serving {arguments.weights} at {address} (Ctrl-C ends it{told})", file=sys.stderr, flush=True)

    run(arguments.weights, token=token, watch=tell, **{name: arguments[name] for name in OPTIONS})
