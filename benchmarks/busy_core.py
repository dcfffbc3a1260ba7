"""How much slower one image is while another program keeps one core busy: servers, test suites and containers live so.

python benchmarks/busy_core.py                       # four models, about a minute; needs a machine that is idle
python benchmarks/busy_core.py vil_tiny --rounds 5   # one model, measured in more turns
python benchmarks/busy_core.py --out busy.json       # the same figures as a file

A process pinned to one core counts for a bounded time. Quiet and busy stretches take turns; a figure is the median of
all passes of one kind. Prints both in ms and their ratio, which should be at most 2.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import mixlab

NAMES = ("caformer_s18", "vil_tiny", "sequencer2d_s", "vil_pico")
TARGET = 2.0
SETTLE = 0.3  # seconds that the scheduler is given to notice the other program
LONGEST = 60  # seconds after which a busy loop ends by itself
LOOP = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
end = time.monotonic() + float(sys.argv[2])
print("busy", flush=True)
while time.monotonic() < end:
    for _ in range(100_000):
        pass
"""


@contextlib.contextmanager
def busy_core(core: int) -> Iterator[None]:
    """Keep a core busy with a process of its own."""
    command = [sys.executable, "-c", LOOP, str(core), str(LONGEST)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(SETTLE)
        try:
            yield
        finally:
            process.kill()


def time_passes(model: torch.nn.Module, x: torch.Tensor, seconds: float) -> list[float]:
    """Milliseconds of each pass, for about so long."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        model(x)
        times.append(1000 * (time.perf_counter() - start))
    return times


@torch.inference_mode()
def measure(name: str, rounds: int, seconds: float) -> dict[str, float]:
    """The median of a pass of batch 1 in a quiet and in a busy machine, and their ratio."""
    torch.manual_seed(0)
    model = mixlab.create_model(name).eval()
    x = torch.randn(1, model.config.in_channels, *model.config.image_size)
    core = max(os.sched_getaffinity(0))
    time_passes(model, x, 0.5)
    quiet: list[float] = []
    busy: list[float] = []
    for _ in range(rounds):
        quiet += time_passes(model, x, seconds)
        with busy_core(core):
            busy += time_passes(model, x, seconds)
    medians = statistics.median(quiet), statistics.median(busy)
    return {"quiet_ms": medians[0], "busy_ms": medians[1], "ratio": medians[1] / medians[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES, metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of every quiet and every busy stretch")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    given = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, {len(os.sched_getaffinity(0))} processors")
    figures = {}
    for name in given.names:
        found = figures[name] = measure(name, given.rounds, given.seconds)
        verdict = "" if found["ratio"] <= TARGET else f"  above {TARGET}"
        medians = f"quiet {found['quiet_ms']:7.1f} ms  busy {found['busy_ms']:7.1f} ms"
        print(f"{name:16} {medians}  {found['ratio']:.2f}x{verdict}")
    if given.out:
        given.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
