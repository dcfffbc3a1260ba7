"""What Vision-LSTM costs as images grow: time per patch, beside the quadratic form, memory, directions, training.

python benchmarks/vision_lstm.py            # everything, about five minutes
python benchmarks/vision_lstm.py time       # or one of: time, quadratic, peers, memory, training
"""

import argparse
import re
import resource
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
from side import beside
from torch import Tensor

import mixlab
from mixlab.deploy import compile_blocks
from mixlab.metrics.timing import Run, time_rounds


def vil(**mixer: object) -> mixlab.Backbone:
    return mixlab.create_model("vil_tiny", mixers={"name": "mlstm", **mixer}).eval()


def image(side: int, batch: int = 1) -> Tensor:
    return torch.randn(batch, 3, side, side)


def over_sizes() -> None:
    model, sides = vil(), (224, 448, 896, 1792)
    images = {side: image(side) for side in sides}
    timings = time_rounds({str(side): partial(model, images[side]) for side in sides}, rounds=6)
    best = {side: timing.best for side, timing in timings.items()}
    for side in sides:
        patches = (side // 16) ** 2
        print(f"{side:5} px  {1e3 * best[str(side)]:8.1f} ms  {1e6 * best[str(side)] / patches:6.1f} us per patch")
    print(f"an 896 image costs {best['896'] / best['224']:.1f} times a 224 image (16 times the patches)")
    print(f"time per patch from 448 to 1792: {best['1792'] / best['448'] / 16 - 1:+.0%}")


def against_the_quadratic_form() -> None:
    for side, rounds in ((448, 20), (896, 2)):
        ours, plain, kept = beside("vil_tiny", "form", batch=1, side=side, rounds=rounds)
        print(
            f"{side} px: chunkwise {ours:.2f} s; parallel {plain:.2f} s, {plain / ours:.1f} times; with freed memory "
            f"kept there too {kept:.2f} s, {kept / ours:.1f}"
        )


def against_peers() -> None:
    import timm

    peer = timm.create_model("vit_tiny_patch16_224").eval()
    plain, quad, compiled, x = vil(), vil(directions="quad"), compile_blocks(vil()), image(224, batch=8)
    runs: dict[str, Run] = {
        "vit_tiny_patch16_224 (timm)": lambda: peer(x),
        "vil_tiny": lambda: plain(x),
        "vil_tiny, quad-directional": lambda: quad(x),
        "vil_tiny, compiled": lambda: compiled(x),
    }
    best = {name: timing.best for name, timing in time_rounds(runs, rounds=30).items()}
    for name, seconds in best.items():
        share = best["vit_tiny_patch16_224 (timm)"] / seconds
        print(f"{name:28} {len(x) / seconds:6.1f} images/s  {share:.2f} of timm's ViT")


def memory() -> None:
    run_child("memory of one image at 896 px", "forward")


def training() -> None:
    run_child("memory of a training step, batch 4 at 448 px", "step")
    run_child("the same with activation checkpointing", "checkpointed")


def run_child(title: str, job: str) -> None:
    done = subprocess.run([sys.executable, __file__, "--child", job], capture_output=True, text=True, check=True)
    print(f"{title}: {done.stdout.strip()}")


def child(job: str) -> None:
    """Growth of the peak of resident memory over a small warm-up, in a process of its own."""
    model, start = vil(), time.perf_counter()
    if job == "forward":
        with torch.inference_mode():
            model(image(64))
            before = peak()
            model(image(896))
    else:
        model.train().set_activation_checkpointing(job == "checkpointed")
        model(image(64)).sum().backward()
        before = peak()
        model(image(448, batch=4)).sum().backward()
    print(f"{peak() - before:.0f} MB, {time.perf_counter() - start:.1f} s")


def peak() -> float:
    """Megabytes. `getrusage` would count what the parent had when it started this process."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.findall(r"VmHWM:\s+(\d+)", status.read_text())[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


PARTS = {
    "time": over_sizes,
    "quadratic": against_the_quadratic_form,
    "peers": against_peers,
    "memory": memory,
    "training": training,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", choices=[*PARTS, []], help="what to measure; everything if nothing is named"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    if arguments.child:
        child(arguments.child)
        return
    for part in arguments.parts or PARTS:
        with torch.inference_mode():
            PARTS[part]()


if __name__ == "__main__":
    main()
