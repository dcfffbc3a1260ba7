"""Measure the forms of the long convolution, shape by shape, and write the table that chooses between them.

python benchmarks/longconv.py               # print what is fastest for each shape; 2 quiet cores, about five minutes
python benchmarks/longconv.py --write       # and keep it in mixlab/configs/longconv.json (`make costs`)
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch

from mixlab.ops.longconv import FORMS, Form, convolve, prepare_1d, prepare_2d

TABLE = Path(__file__).parent.parent / "mixlab" / "configs" / "longconv.json"
SIDES, LENGTHS = (4, 7, 14, 20, 28, 40, 56, 80, 112, 160, 224), (8, 16, 49, 98, 196, 784, 3136, 12544, 50176)
KERNELS = (3, 5, 7, 9, 13, 21, 27, 55, 111)
DIRECT, MATRIX = 4000, 1024  # beyond so many taps in all, or places per axis, nobody would wait for the form
NUMBERS = 2**21  # numbers in an input: what a batch of eight has in the first stage of a small model
ROUNDS = 7


def measure(sizes: tuple[int, ...], taps: int) -> dict[Form, float]:
    """Seconds of each form for one shape, the kernel ready, all forms in turn, the best of several."""
    channels = min(512, max(16, 64 * 56 // sizes[-1]))
    x = torch.randn(max(1, NUMBERS // (math.prod(sizes) * channels)), *sizes, channels)
    kernel = torch.randn(*[taps] * len(sizes), channels)
    prepared = {}
    for form in FORMS:
        slow = form == "direct" and taps ** len(sizes) > DIRECT and taps > 120
        if slow or (form == "matrix" and sizes[-1] > MATRIX):
            continue
        prepared[form] = (
            prepare_1d(kernel, *sizes, form=form) if len(sizes) == 1 else prepare_2d(kernel, *sizes, form=form)
        )
    best = dict.fromkeys(prepared, math.inf)
    for _ in range(ROUNDS):
        for form, ready in prepared.items():
            start = time.perf_counter()
            convolve(x, ready)
            best[form] = min(best[form], time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep what was measured")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    shapes = [((side, side), taps) for side in SIDES for taps in sorted({*KERNELS, 2 * side - 1}) if taps < 2 * side]
    shapes += [((length,), taps) for length in LENGTHS for taps in sorted({9, 55, 2 * length - 1}) if taps < 2 * length]
    rows: dict[str, list[dict[str, object]]] = {"1": [], "2": []}
    with torch.inference_mode():
        for sizes, taps in shapes:
            seconds = measure(sizes, taps)
            told = ", ".join(f"{form} {1e3 * spent:.2f} ms" for form, spent in seconds.items())
            print(f"{' x '.join(map(str, sizes)):9} {taps:6} taps: {told}", flush=True)
            kept = {form: float(f"{spent:.2e}") for form, spent in seconds.items()}
            rows[str(len(sizes))].append({"size": sizes[0], "taps": taps, "seconds": kept})
    if arguments.write:
        lines = {axes: ",\n  ".join(json.dumps(row) for row in listed) for axes, listed in rows.items()}
        body = ",\n ".join(f'"{axes}": [\n  {text}\n ]' for axes, text in lines.items())
        new = TABLE.with_suffix(".new")
        new.write_text(f'{{"seconds": {{\n {body}\n}}}}\n', encoding="utf-8")
        new.replace(TABLE)


if __name__ == "__main__":
    main()
