"""What Hyena's long convolutions cost: kept filters and the chosen form beside filters made anew and the FFT; memory.

python benchmarks/hyena.py            # everything, about three minutes
python benchmarks/hyena.py speed      # or one of: speed, sizes, memory
"""

import argparse
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
from side import beside

import mixlab
from mixlab.metrics.timing import time_rounds

MODELS = ("hpx_former_s18", "hb_former_s18")


def speed() -> None:
    for name in MODELS:
        for batch, rounds in ((1, 20), (8, 8)):
            ours, plain, kept = beside(name, "form", batch=batch, side=224, rounds=rounds)
            print(
                f"{name} at 224 px, batch {batch}: {1e3 * ours:.0f} ms; filters made anew and the FFT {1e3 * plain:.0f}"
                f" ms, {plain / ours:.2f} times; with freed memory kept too {1e3 * kept:.0f} ms, {kept / ours:.2f}"
            )


def sizes() -> None:
    for name in MODELS:
        model = mixlab.create_model(name).eval()
        for side in (224, 384, 512, 896):
            x = torch.randn(1, 3, side, side)
            best = time_rounds({"": partial(model, x)}, rounds=3)[""].best
            print(f"{name} at {side} px: {1e3 * best:.0f} ms")


def memory() -> None:
    for name in MODELS:
        done = subprocess.run([sys.executable, __file__, "--child", name], capture_output=True, text=True, check=True)
        print(f"{name}, one image at 896 px: {done.stdout.strip()}")


def child(name: str) -> None:
    """Growth of the peak of resident memory over a small warm-up, in a process of its own."""
    model = mixlab.create_model(name).eval()
    model(torch.randn(1, 3, 64, 64))
    before, start = peak(), time.perf_counter()
    model(torch.randn(1, 3, 896, 896))
    print(f"{peak() - before:.0f} MB, {time.perf_counter() - start:.1f} s with the filters made once")


def peak() -> float:
    return int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0]) / 1024


PARTS = {"speed": speed, "sizes": sizes, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", choices=[*PARTS, []], help="what to measure; everything if nothing is named"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    with torch.inference_mode():
        if arguments.child:
            child(arguments.child)
            return
        for part in arguments.parts or PARTS:
            PARTS[part]()


if __name__ == "__main__":
    main()
