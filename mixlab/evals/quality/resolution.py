"""Accuracy and cost at sizes that a model was not trained at, without fine-tuning (Sequencer, Figures 3 and 4)."""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor

from mixlab.core.errors import MixlabError, require
from mixlab.core.processes import Processes, choose_device
from mixlab.data.loader import Loader
from mixlab.data.open import AnyData, open_data
from mixlab.evals.cost.execution import step as run_once
from mixlab.evals.cost.speed import MEBIBYTE, child_answer, measure_speed, peak, reset_peak
from mixlab.evals.quality.classes import open_for_classes
from mixlab.evals.quality.own_grid import OWN, Step, is_padded, own_step, parse_step, sizes_for
from mixlab.evals.quality.resized import resized
from mixlab.evals.subjects import Source, Subject, open_subject, short_names
from mixlab.findings.findings import Cell, Finding, Picture, figure, finding, legend_below
from mixlab.findings.svg import need
from mixlab.models.config import parse_image_size
from mixlab.models.model import Model
from mixlab.training.tasks.classification import accuracy

COLUMNS = ("model", "size", "own size", "weights", "top-1, %", "relative", "images/s", "peak, MB", "note")
SHOWN = ("own_size", "weights", "top1", "relative", "images_per_second", "peak_mb", "note")
PANELS = {
    "top1": "top-1, %",
    "relative": "top-1 relative to the model's own size",
    "images_per_second": "images/s",
    "peak_mb": "peak memory, MB",
}
MARKERS = "osD^vPX*<>"
PADDED = "padded"
CROSS = {"color": "black", "marker": "x", "markersize": 7, "linestyle": "", "zorder": 3}
LIMIT_SECONDS = 600.0
Watch = Callable[[int, int], None]  # images more, of how many in all


@dataclass(frozen=True, kw_only=True)
class ResolutionRow:
    """A model at a size; its own is the one that it was trained at. `reason` says why there is no number."""

    size: tuple[int, int]
    own_size: bool
    weights: str | None = None
    top1: float | None = None
    relative: float | None = None
    images_per_second: float | None = None
    peak_mb: float | None = None
    padded: bool | None = None  # zeros up to whole patches; None where it is not known
    reason: str = ""

    @property
    def note(self) -> str:
        return self.reason or (PADDED if self.padded else "")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is measured, and how."""

    source: AnyData
    sizes: tuple[tuple[int, int], ...]
    step: Step
    batch: int
    workers: int
    crop: float | None
    seconds: float
    memory: bool
    seed: int


def resolution(
    models: Sequence[Source],
    data: str | PathLike[str],
    *,
    sizes: Sequence[int | tuple[int, int]],
    step: Step = None,
    split: Literal["train", "val", "test"] = "val",
    crop: float | None = None,
    batch: int = 16,
    workers: int = 2,
    seconds: float = 1.0,
    memory: bool = True,
    device: str = "auto",
    seed: int = 0,
    watch: Watch | None = None,
) -> tuple[Finding, dict[str, Any]]:
    """Top-1, top-1 relative to the size that a model was trained at (which is always measured too), speed and memory.

    `seconds` go into each measurement of speed; 0 leaves it out. `batch` is for everything. A size that a model cannot
    take has a row with the reason; one that it pads is marked. With a `step`, sizes are rounded to multiples of it: so
    many pixels, or "own" for each model's own step, at which nothing is padded. Memory on a CPU is measured in another
    process, so only of models given as text.
    """
    step = parse_step(step)
    require(bool(models) and bool(sizes), "one or more models, and one or more sizes.")
    require(batch >= 1 and seconds >= 0, f"a batch of 1 or more and no negative seconds; got {batch}, {seconds}.")
    source = open_data(data, split)
    asked = tuple(dict.fromkeys(parse_image_size(size) for size in sizes))
    wanted = Wanted(
        source=source, sizes=asked, step=step, batch=batch, workers=workers, crop=crop, seconds=seconds, memory=memory,
        seed=seed,
    )  # fmt: skip
    subjects = [open_for_classes(model, source.class_names, str(data), seed=seed) for model in models]
    total = len(source) * sum(len(sizes_of(one, wanted)) for one in subjects)
    chosen, found = choose_device(device, 0), []
    for model, subject in zip(models, subjects, strict=True):
        own = subject.to(chosen)
        found.append(rows_of(own, model, wanted, None if watch is None else lambda more: watch(more, total)))
        own.to("cpu")
    settings = {"data": str(data), "split": split, "images": len(source), "batch": batch, "crop": crop}
    settings |= {"step": step, "steps": [own_step(one) for one in subjects] if step == OWN else None}
    settings |= {"device": chosen.type, "threads": torch.get_num_threads()}
    return tell(subjects, found, settings), {"resolution": curves(short_names(subjects), found)}


def tell(subjects: Sequence[Subject], found: Sequence[Sequence[ResolutionRow]], settings: dict[str, Any]) -> Finding:
    caption = "Accuracy and cost at sizes that the models were not trained at, without fine-tuning."
    models = {"models": [one.name for one in subjects], "trained": [one.trained for one in subjects]}
    return finding(
        *("resolution", "Resolution adaptability", COLUMNS, table_of(short_names(subjects), found)),
        settings={**models, **settings},
        data={"rows": [[asdict(row) for row in rows] for rows in found]},
        pictures=(Picture(name="resolution", caption=caption),),
    )


def sizes_of(subject: Subject, wanted: Wanted) -> list[tuple[int, int]]:
    """What was asked for, on the model's grid if that was asked for too, and the size trained at, smallest first."""
    asked = sizes_for(subject, wanted.sizes, wanted.step)
    return sorted({*asked, subject.image_size}, key=lambda size: (size[0] * size[1], size))


# -- one model -----------------------------------------------------------------------------------


def rows_of(
    subject: Subject, model: Source, wanted: Wanted, watch: Callable[[int], None] | None
) -> list[ResolutionRow]:
    rows = [row_of(subject, model, size, wanted, watch) for size in sizes_of(subject, wanted)]
    at_home = next(row.top1 for row in rows if row.own_size)
    return [with_relative(row, at_home) for row in rows]


def with_relative(row: ResolutionRow, at_home: float | None) -> ResolutionRow:
    if row.top1 is None or not at_home:
        return row
    return ResolutionRow(**{**asdict(row), "relative": row.top1 / at_home})


def row_of(
    subject: Subject, model: Source, size: tuple[int, int], wanted: Wanted, watch: Callable[[int], None] | None
) -> ResolutionRow:
    about: dict[str, Any] = {"size": size, "own_size": size == subject.image_size}
    about["padded"] = is_padded(subject, size)
    try:
        fitted, about["weights"] = resized(subject, size)
        about["top1"] = top1_of(fitted, wanted, watch)
        if wanted.seconds:
            speed = measure_speed(
                fitted.model, size, batch=wanted.batch, seconds=wanted.seconds, in_channels=fitted.in_channels
            )
            about["images_per_second"] = speed.images_per_second
        if wanted.memory:
            about["peak_mb"] = peak_of(fitted, model, wanted)
    except (MixlabError, MemoryError, RuntimeError) as error:
        if not isinstance(error, MixlabError) and not is_out_of_memory(error):
            raise
        about["reason"] = str(error) if isinstance(error, MixlabError) else "memory ran out"
    return ResolutionRow(**about)


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


@torch.inference_mode()
def top1_of(subject: Subject, wanted: Wanted, watch: Callable[[int], None] | None) -> float:
    transform = subject.transform(crop=wanted.crop)
    loader = Loader(wanted.source, transform, batch_size=wanted.batch, train=False, seed=0, workers=wanted.workers)
    device = next(subject.model.parameters()).device
    return accuracy(subject.model, loader, Processes(device=device), watch)["top1"]


# -- memory --------------------------------------------------------------------------------------


def peak_of(subject: Subject, model: Source, wanted: Wanted) -> float | None:
    """Mebibytes of the weights and of one batch; None where it cannot be known."""
    device = next(subject.model.parameters()).device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        run_once(subject.model, random_batch(subject, wanted.batch), training=False)
        return torch.cuda.max_memory_allocated(device) / MEBIBYTE
    if device.type != "cpu" or isinstance(model, Model):
        return None
    job = {"model": str(model), "size": list(subject.image_size), "batch": wanted.batch, "seed": wanted.seed}
    job |= {"num_classes": None if subject.trained else subject.num_classes, "threads": torch.get_num_threads()}
    what = f"peak memory of {subject.name!r} at {size_text(subject.image_size)} px"
    return float(child_answer("mixlab.evals.quality.resolution", json.dumps(job), what, LIMIT_SECONDS)["mb"])


def random_batch(subject: Subject, batch: int) -> Tensor:
    weight = next(subject.model.parameters())
    return torch.randn(batch, subject.in_channels, *subject.image_size, device=weight.device, dtype=weight.dtype)


def measure_peak(job: Mapping[str, Any]) -> float:
    """In the child: weights, and growth of the peak of resident memory over that of one image."""
    torch.set_num_threads(job["threads"])
    subject = open_subject(job["model"], num_classes=job["num_classes"], seed=job["seed"])
    subject, _ = resized(subject, parse_image_size(job["size"]))
    model = subject.model
    held = sum(tensor.nbytes for tensor in itertools.chain(model.parameters(), model.buffers())) / MEBIBYTE
    run_once(model, random_batch(subject, 1), training=False)
    before = reset_peak()
    run_once(model, random_batch(subject, job["batch"]), training=False)
    return held + max(0.0, peak() - before)


def main() -> int:
    parser = argparse.ArgumentParser(description="The process that measures peak memory.")
    parser.add_argument("--child", required=True, help="the job as JSON")
    try:
        print(json.dumps({"mb": measure_peak(json.loads(parser.parse_args().child))}))
    except MixlabError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


# -- what is shown -------------------------------------------------------------------------------


def size_text(size: Sequence[int]) -> str:
    return str(size[0]) if size[0] == size[1] else f"{size[0]}x{size[1]}"


def table_of(names: Sequence[str], found: Sequence[Sequence[ResolutionRow]]) -> list[list[Cell]]:
    return [
        [name, size_text(row.size), *(getattr(row, field) for field in SHOWN)]
        for name, rows in zip(names, found, strict=True)
        for row in rows
    ]


def curves(names: Sequence[str], found: Sequence[Sequence[ResolutionRow]]) -> Any:
    """A panel for each number that was measured; a model's own size is filled, a padded one is crossed out."""
    panels = [name for name in PANELS if any(getattr(row, name) is not None for rows in found for row in rows)] or [
        "top1"
    ]
    drawn = figure(8.0 if len(panels) > 1 else 4.6, 0.5 + 2.7 * ((len(panels) + 1) // 2))
    grid = drawn.subplots((len(panels) + 1) // 2, min(2, len(panels)), squeeze=False).ravel()
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    for axes, panel in zip(grid, panels, strict=False):
        for index, (name, rows) in enumerate(zip(names, found, strict=True)):
            known = [row for row in rows if getattr(row, panel) is not None]
            sides = [(row.size[0] * row.size[1]) ** 0.5 for row in known]
            look = {"color": f"C{index % 10}", "marker": MARKERS[index % len(MARKERS)], "markersize": 5}
            axes.plot(sides, [getattr(row, panel) for row in known], label=name, markerfacecolor="white", **look)
            home = [(side, getattr(row, panel)) for side, row in zip(sides, known, strict=True) if row.own_size]
            axes.plot(*(zip(*home, strict=True) if home else ((), ())), linestyle="", **look)
            crossed = [(side, getattr(row, panel)) for side, row in zip(sides, known, strict=True) if row.padded]
            axes.plot(*(zip(*crossed, strict=True) if crossed else ((), ())), **CROSS)
        axes.set_title(PANELS[panel], loc="left", fontsize=9)
        axes.set_xlabel("image size, px", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    handles, shown = grid[0].get_legend_handles_labels()
    if any(row.padded for rows in found for row in rows):
        handles, shown = [*handles, need("matplotlib.lines").Line2D([], [], **CROSS)], [*shown, PADDED]
    legend_below(drawn, handles, shown, side="center", ncols=min(3, len(shown)), fontsize=8)
    return drawn


if __name__ == "__main__":
    sys.exit(main())
