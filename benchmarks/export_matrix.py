"""Every model in every export format: difference from PyTorch, size and speed, written into docs/export.md.

python benchmarks/export_matrix.py                  # all pico models
python benchmarks/export_matrix.py --full           # and one or two models of a real size per family, as ONNX
python benchmarks/export_matrix.py --full --full-targets onnx torch_export aot  # and these; compiling takes an hour
python benchmarks/export_matrix.py vil_tiny --print # one model, to the terminal only

Speed is that of one batch, the file and eager PyTorch in turn, the best of several rounds with the same threads.
Between the two nobody runs for a moment: the threads of onnxruntime look for work for a while, which slows others.
"""

import argparse
import gc
import itertools
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import mixlab
from mixlab.core.errors import MixlabError
from mixlab.core.files import write_whole
from mixlab.deploy.export import export, open_export
from mixlab.findings.results import describe_machine
from mixlab.metrics.timing import Timing

PAGE = Path(__file__).parent.parent / "docs" / "export.md"
PAUSE = 0.1  # seconds
START, END = "<!-- export matrix: start -->", "<!-- export matrix: end -->"
TARGETS = {
    "onnx": ("onnx", None),
    "onnx int8": ("onnx", "int8"),
    "torch_export": ("torch_export", None),
    "aot": ("aot", None),
}
FULL = (
    "poolformerv2_s12",
    "caformer_s18",
    "sequencer2d_s",
    "vil_tiny",
    "deit_tiny",
    "hpx_former_s18",
    "hb_former_s18",
    "coat_lite_tiny",
)
HEADER = ("model", "px", "target", "largest difference", "scores up to", "MB", "PyTorch ms", "file ms", "times as fast")


@dataclass(frozen=True)
class Row:
    model: str
    side: int
    target: str
    difference: float
    scale: float
    megabytes: float
    eager: Timing
    file: Timing

    def cells(self) -> tuple[str, ...]:
        times = [f"{1e3 * timing.best:.1f}" for timing in (self.eager, self.file)]
        ratio = f"{self.eager.best / self.file.best:.2f}"
        found = (f"{self.difference:.1e}", f"{self.scale:.2f}", f"{self.megabytes:.1f}", *times, ratio)
        return (f"`{self.model}`", str(self.side), self.target, *found)


def measure(name: str, target: str, batch: int, rounds: int) -> Row:
    torch.manual_seed(0)
    model = mixlab.create_model(name).eval()
    for member in model.modules():
        if isinstance(member, mixlab.Backbone) and hasattr(member, "head"):
            nn.init.normal_(member.get_parameter("head.classifier.weight"), std=0.02)  # Sequencer's starts at zero
    kind, quantize = TARGETS[target]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("model.onnx" if kind == "onnx" else "model.pt2")
        result = export(model, path, kind, quantize=quantize, say=tell(f"{name}, {target}"))
        run = open_export(path).run
        images = torch.randn(batch, model.config.in_channels, *result.image_size)

        def eager() -> None:
            with torch.inference_mode():
                model(images)

        timings = in_turn({"eager": eager, "file": lambda: run(images)}, rounds)
    apart = result.difference if result.quantized_difference is None else result.quantized_difference
    megabytes, side = result.bytes / 1e6, result.image_size[0]
    return Row(name, side, target, apart, result.scale, megabytes, timings["eager"], timings["file"])


def in_turn(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            time.sleep(PAUSE)
            for _ in range(3):
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
    return {name: Timing.of(found) for name, found in seconds.items()}


def tell(subject: str) -> Callable[[str], None] | None:
    return (lambda step: print(f"{subject}: {step}", file=sys.stderr)) if sys.stderr.isatty() else None


def table(pairs: list[tuple[str, str]], batch: int, rounds: int) -> list[str]:
    lines = [f"| {' | '.join(HEADER)} |", "|---|--:|---|" + "--:|" * (len(HEADER) - 3)]
    for name, target in pairs:
        try:
            cells = measure(name, target, batch, rounds).cells()
        except MixlabError as error:
            reason = " ".join(str(error).split())[:120].replace("|", "/")
            cells = (f"`{name}`", "", target, f"none: {reason}", *("",) * 5)
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
        gc.collect()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models; default: all pico models")
    parser.add_argument("--full", action="store_true", help="and one model of a real size per family")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--full-targets", nargs="+", default=["onnx"], choices=list(TARGETS), help="of these")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--print", action="store_true", help="leave the page as it is")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    pairs = list(itertools.product(arguments.names or mixlab.list_models("*_pico"), arguments.targets))
    pairs += itertools.product(FULL if arguments.full else (), arguments.full_targets)
    machine = ", ".join(f"{key} {value}" for key, value in describe_machine().items())
    lines = [f"Batch {arguments.batch}, {arguments.threads} threads, {machine}.", ""]
    lines += table(pairs, arguments.batch, arguments.rounds)
    if not arguments.print:
        page = PAGE.read_text(encoding="utf-8")
        inside = re.compile(f"{re.escape(START)}.*?{re.escape(END)}", re.S)
        assert inside.search(page), f"{PAGE} has lost its markers"
        write_whole(PAGE, inside.sub(lambda _: "\n".join([START, "", *lines, "", END]), page))


if __name__ == "__main__":
    main()
