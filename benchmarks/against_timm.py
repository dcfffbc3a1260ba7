"""Images per second beside timm, both sides alternating in one process, best of several rounds.

python benchmarks/against_timm.py convformer_s18 caformer_s18 poolformerv2_s12
"""

import argparse
import time

import torch

import mixlab

import timm  # isort: skip  (after mixlab, which mends a torchvision without operators)


DEFAULT = ["convformer_s18", "caformer_s18", "poolformerv2_s12", "sequencer2d_s", "coat_lite_small", "coat_tiny"]


def seconds(model: torch.nn.Module, image: torch.Tensor) -> float:
    start = time.perf_counter()
    model(image)
    return time.perf_counter() - start


def compare(name: str, batch: int, side: int, rounds: int) -> None:
    image = torch.randn(batch, 3, side, side)
    models = {"mixlab": mixlab.create_model(name).eval(), "timm": timm.create_model(name).eval()}
    best = dict.fromkeys(models, float("inf"))
    with torch.inference_mode():
        for model in models.values():
            model(image)
        for _ in range(rounds):
            for side_name, model in models.items():
                best[side_name] = min(best[side_name], seconds(model, image))
    speeds = {side_name: batch / value for side_name, value in best.items()}
    ratio = speeds["mixlab"] / speeds["timm"]
    print(
        f"{name:20} mixlab {speeds['mixlab']:6.1f}  timm {speeds['timm']:6.1f} images/s  ratio {ratio:.2f}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=DEFAULT)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"float32, eager, batch {arguments.batch}, {arguments.image_size} px, {arguments.threads} threads")
    for name in arguments.names:
        compare(name, arguments.batch, arguments.image_size, arguments.rounds)


if __name__ == "__main__":
    main()
