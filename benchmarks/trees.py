"""Two trees of Mixlab beside each other: is a change faster or slower, and on which model?

python benchmarks/trees.py ../old .                                    # eager, latency and training of every family
python benchmarks/trees.py ../old . vil_tiny@96 --jobs latency

Each tree is a folder with built kernels, and runs in a process of its own; the two take turns, one at a time. A ratio
above 1 says that the second tree is faster: that of the best runs, and the median over pairs of turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

MODELS = (
    "convformer_s18@224",
    "caformer_s18@224",
    "poolformerv2_s12@224",
    "coat_lite_small@224",
    "coat_tiny@224",
    "sequencer2d_s@224",
    "vil_tiny@224",
    "hpx_former_s18@224",
    "hb_former_s18@224",
    "vil_tiny@96",
    "hpx_former_s18@96",
)
JOBS = ("eager", "latency", "training")
BATCH = 8
WORKER = """
import json, sys, time
import torch, mixlab
torch.set_num_threads(int(sys.argv[1]))
models, steps = {}, {}

def step_of(name, side, job):
    torch.manual_seed(0)
    if name not in models:
        models.clear(); steps.clear()
        models[name] = mixlab.create_model(name)
    model = models[name]
    x = torch.randn(1 if job == "latency" else BATCH, model.config.in_channels, side, side)
    if job == "training":
        def run():
            model.train()
            model.zero_grad(set_to_none=True)
            model(x).float().square().mean().backward()
    else:
        def run():
            model.eval()
            with torch.inference_mode():
                model(x)
    return run

for line in sys.stdin:
    name, side, job, seconds = json.loads(line)
    key = (name, side, job)
    if key not in steps:
        steps[key] = step_of(*key)
        steps[key](); steps[key]()
    times, end = [], time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        steps[key]()
        times.append(time.perf_counter() - start)
    print(json.dumps(times), flush=True)
"""


class Tree:
    """A process that imports Mixlab from one folder and times what it is asked for."""

    def __init__(self, folder: Path, threads: int) -> None:
        environment = os.environ | {"PYTHONPATH": str(folder.resolve())}
        code = WORKER.replace("BATCH", str(BATCH))
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=environment,
        )

    def time(self, model: str, side: int, job: str, seconds: float) -> list[float]:
        """Seconds of each run within about so many seconds, and of one run at least."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([model, side, job, seconds]) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"The process of one tree ended while it ran {model} at {side} px ({job}).")
        times: list[float] = json.loads(answer)
        return times

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()


def compare(trees: list[Tree], model: str, side: int, job: str, turns: int, seconds: float) -> dict[str, Any]:
    """The times of both trees in turns, which begin with the one and with the other."""
    best: list[list[float]] = [[], []]
    medians: list[list[float]] = [[], []]
    for tree in trees:
        tree.time(model, side, job, 0)
    for turn in range(turns):
        for index in (0, 1) if turn % 2 == 0 else (1, 0):
            times = trees[index].time(model, side, job, seconds)
            best[index].append(min(times))
            medians[index].append(statistics.median(times))
    return {
        "model": f"{model}@{side}",
        "job": job,
        "old_ms": 1e3 * min(best[0]),
        "new_ms": 1e3 * min(best[1]),
        "best": min(best[0]) / min(best[1]),
        "median": statistics.median(old / new for old, new in zip(*medians, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a folder that holds mixlab/ with built kernels")
    parser.add_argument("new", type=Path, help="another one")
    parser.add_argument(
        "models", nargs="*", default=MODELS, metavar="MODEL@PX", help="what is run; every family unless given"
    )
    parser.add_argument("--jobs", nargs="+", default=JOBS, choices=JOBS)
    parser.add_argument("--turns", type=int, default=6, help="turns of each tree (%(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a turn (%(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of PyTorch (%(default)s)")
    options = parser.parse_args()
    for folder in (options.old, options.new):
        if not (folder / "mixlab" / "__init__.py").is_file():
            parser.error(f"{folder} holds no mixlab/__init__.py.")
    trees = [Tree(folder, options.threads) for folder in (options.old, options.new)]
    try:
        print("| model | job | old ms | new ms | best | median |\n|---|---|--:|--:|--:|--:|")
        for name in options.models:
            model, _, side = name.partition("@")
            for job in options.jobs:
                row = compare(trees, model, int(side or 224), job, options.turns, options.seconds)
                print(
                    "| {model} | {job} | {old_ms:.1f} | {new_ms:.1f} | {best:.2f} | {median:.2f} |".format(**row),
                    flush=True,
                )
    finally:
        for tree in trees:
            tree.close()


if __name__ == "__main__":
    main()
