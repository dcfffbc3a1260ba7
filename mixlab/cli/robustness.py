"""`mixlab robustness`."""

import sys
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from mixlab.cli.findings import add_output_arguments, check_out, put_out
from mixlab.cli.printing import parse_size
from mixlab.cli.progress import progress

NONE = "none"
INTERRUPTED = 130  # the exit code after Ctrl-C
FOLDERS = {"a": "imagenet_a", "r": "imagenet_r", "sketch": "imagenet_sketch", "v2": "imagenet_v2"}


def robustness_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="What is left of the accuracy on corrupted, collected anew and attacked images. Example: mixlab "
        "robustness run/final.safetensors timm:resnet50=pretrained imagenet --images 5000 --out found. Without "
        "options: clean, the 15 standard corruptions of ImageNet-C, FGSM and PGD."
    )
    parser.add_argument("models", nargs="+", help="weight files, NAME=weights, timm:NAME=weights")
    parser.add_argument(
        "data", help="a dataset as `mixlab eval` takes it, or none if the options below bring the images"
    )
    add_corruption_arguments(parser)
    parser.add_argument("--imagenet-a", default=None, help="the folder of ImageNet-A")
    parser.add_argument("--imagenet-r", default=None, help="the folder of ImageNet-R")
    parser.add_argument("--imagenet-sketch", default=None, help="the folder of ImageNet-Sketch")
    parser.add_argument("--imagenet-v2", default=None, help="the folder of ImageNet-V2")
    parser.add_argument("--imagenet-real", default=None, help="real.json, or timm for its copy; DATA is ImageNet's val")
    parser.add_argument("--attacks", nargs="+", default=["fgsm", "pgd"], help="fgsm, pgd or none")
    parser.add_argument("--epsilon", nargs="+", type=float, default=[1.0], help="largest changes, in levels of 255")
    parser.add_argument("--steps", type=int, default=5, help="of PGD")
    parser.add_argument(
        "--step-size", type=float, default=None, help="of PGD, in levels of 255; default: half of epsilon"
    )
    add_feeding_arguments(parser)
    add_output_arguments(parser)
    return parser


def add_corruption_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--corruptions",
        nargs="+",
        default=["standard"],
        help="standard (15), all (19), none, groups (noise, blur, weather, digital, extra) or names",
    )
    parser.add_argument("--severities", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument(
        "--severity-set",
        default="imagenet",
        choices=["imagenet", "tiny_imagenet", "cifar"],
        help="the published parameters: for images of 224, 64 or 32 pixels",
    )
    parser.add_argument("--imagenet-c", default=None, help="a prepared ImageNet-C: CORRUPTION/SEVERITY/CLASS/...")


def add_feeding_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--split", default="val", choices=["train", "val", "test"])
    parser.add_argument("--images", type=int, default=None, help="take that many images of DATA, drawn by the seed")
    parser.add_argument("--image-size", default=None, help="384 or 384x256; default: each model's own")
    parser.add_argument(
        "--crop", type=float, default=None, help="share of the resized image; default: each model's own"
    )
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0, help="of noise, weather and the choice of images")


def robustness(arguments: Namespace) -> int:
    """Measure corruptions, variants of ImageNet and attacks."""
    from mixlab.evals.quality.robustness import robustness as run

    check_out(arguments)
    data = None if arguments.data == NONE else arguments.data
    tests, feeding = tests_of(arguments, data), feeding_of(arguments)
    with progress("opening") as bar:
        found, figures = run(
            arguments.models, data, split=arguments.split, tests=tests, feeding=feeding, watch=bar.tell
        )
    put_out(found, arguments, figures)
    if found.settings["interrupted"]:
        print("interrupted: this is what was measured by then", file=sys.stderr)
        return INTERRUPTED
    return 0


def tests_of(arguments: Namespace, data: str | None) -> Any:
    from mixlab.evals.quality.attacks import Attack
    from mixlab.evals.quality.robustness import Trials

    made = data is not None or arguments.imagenet_c is not None
    kinds = [] if data is None else [kind for kind in arguments.attacks if kind != NONE]
    return Trials(
        corruptions=tuple(arguments.corruptions) if made else (),
        severities=tuple(arguments.severities),
        severity_set=arguments.severity_set,
        prepared=arguments.imagenet_c,
        variants={kind: arguments[name] for kind, name in FOLDERS.items() if arguments[name] is not None},
        real=arguments.imagenet_real,
        attacks=tuple(
            Attack(kind=kind, epsilon=epsilon, steps=arguments.steps, step_size=arguments.step_size)
            for kind in dict.fromkeys(kinds)
            for epsilon in sorted(set(arguments.epsilon))
        ),
    )


def feeding_of(arguments: Namespace) -> Any:
    from mixlab.core.processes import choose_device
    from mixlab.evals.quality.examine import Feeding

    names = ("images", "crop", "batch", "workers", "seed")
    size = None if arguments.image_size is None else parse_size(arguments.image_size)
    device = choose_device(arguments.device, 0)
    return Feeding(device=device, image_size=size, **{name: arguments[name] for name in names})
