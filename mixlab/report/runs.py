"""Training runs on a page: their names, a table for each task and data, and their learning curves."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from mixlab.report.charts import TrainingCurve, curve_chart, looks
from mixlab.report.costs import show_count, show_time
from mixlab.report.page_table import PageCell, PageRow, PageTable, page_cell
from mixlab.report.report import Metrics, TrainedRun
from mixlab.report.table import MISSING


@dataclass(frozen=True)
class RunScore:
    """What a task reports after an epoch; `scale` brings it to percent."""

    name: str
    label: str
    scale: float = 100.0


SCORES = {
    "classification": (RunScore("top1", "top-1 %", 1.0), RunScore("top5", "top-5 %", 1.0)),
    "segmentation": (
        RunScore("mIoU", "mIoU %"),
        RunScore("pixel_accuracy", "pixel accuracy %"),
        RunScore("mean_accuracy", "mean accuracy %"),
    ),
    "detection": (
        RunScore("box_AP", "box AP %"),
        RunScore("box_AP50", "box AP50 %"),
        RunScore("mask_AP", "mask AP %"),
        RunScore("mask_AP50", "mask AP50 %"),
    ),
}
LOSSES = (RunScore("val_loss", "validation loss", 1.0), RunScore("train_loss", "training loss", 1.0))


def scores_of(run: TrainedRun) -> tuple[RunScore, ...]:
    return SCORES.get(run.task, ())


def value_of(metrics: Metrics | None, score: RunScore) -> float | None:
    """None where it was not measured, is not finite, or is the -1 that stands for a class without objects."""
    value = None if metrics is None else metrics.get(score.name)
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return score.scale * value


def score_of(run: TrainedRun, score: RunScore) -> float | None:
    """On the test split, else the last validation."""
    tested = value_of(run.test, score)
    return tested if tested is not None else value_of(run.history[-1] if run.history else None, score)


def labels(runs: Sequence[TrainedRun]) -> list[str]:
    """A name for each: its model, and where that is not enough, as much of the end of its folder as tells it apart."""
    counts = Counter(run.config.model for run in runs)
    return [
        run.config.model if counts[run.config.model] == 1 else f"{run.config.model} ({tail(run, runs)})" for run in runs
    ]


def tail(run: TrainedRun, runs: Sequence[TrainedRun]) -> str:
    parts = PurePath(run.source).parts
    others = [PurePath(one.source).parts for one in runs if one is not run and one.config.model == run.config.model]
    for length in range(1, len(parts)):
        if all(other[-length:] != parts[-length:] for other in others):
            return "/".join(parts[-length:])
    return run.source


def by_task_and_data(runs: Sequence[TrainedRun]) -> dict[tuple[str, str], list[tuple[str, TrainedRun]]]:
    """Runs that may be compared, with their names."""
    found: dict[tuple[str, str], list[tuple[str, TrainedRun]]] = {}
    for name, run in zip(labels(runs), runs, strict=True):
        found.setdefault((run.task, run.config.data), []).append((name, run))
    return found


# -- a table ---------------------------------------------------------------------------------------


def epochs_cell(run: TrainedRun) -> PageCell:
    done = run.history[-1]["epoch"] if run.history else 0
    return PageCell(f"{done:.0f}" + ("" if run.finished else ", not finished"), float(done or 0))


def number_cell(value: float | None, text: str) -> PageCell:
    return PageCell(MISSING, None) if value is None else PageCell(text.format(value), value)


def count_cell(value: float | None) -> PageCell:
    return PageCell(MISSING, None) if value is None else PageCell(show_count(value), value)


def training_cell(run: TrainedRun) -> PageCell:
    seconds = sum(row.get("train_seconds") or 0.0 for row in run.history)
    return PageCell(show_time(seconds), seconds) if run.history else PageCell(MISSING, None)


def run_table(runs: Sequence[tuple[str, TrainedRun]]) -> PageTable:
    """One row per run: the last validation, the test split where there is one, and what it took."""
    scores = scores_of(runs[0][1])
    last = {name: run.history[-1] if run.history else None for name, run in runs}
    columns: list[tuple[str, list[PageCell]]] = [("run", [page_cell(name) for name, _ in runs])]
    for place, rows in (("val", last), ("test", {name: run.test for name, run in runs})):
        for score in scores:
            cells = [number_cell(value_of(rows[name], score), "{:.2f}") for name, _ in runs]
            columns.append((f"{place} {score.label}", cells))
    columns += [
        ("parameters", [count_cell(run.params) for _, run in runs]),
        ("MACs", [count_cell(run.macs) for _, run in runs]),
        ("epochs", [epochs_cell(run) for _, run in runs]),
        ("seed", [page_cell(run.config.seed) for _, run in runs]),
        ("training", [training_cell(run) for _, run in runs]),
        ("training FLOP", [count_cell(run.train_flops) for _, run in runs]),
    ]
    shown = [(head, cells) for head, cells in columns if any(cell.value is not None for cell in cells)]
    rows_ = [PageRow([cells[index] for _, cells in shown]) for index in range(len(runs))]
    return PageTable([head for head, _ in shown], rows_)


# -- learning curves -------------------------------------------------------------------------------


def run_charts(runs: Sequence[tuple[str, TrainedRun]], prefix: str) -> list[str]:
    """One <svg> for each score and loss that was recorded."""
    look, charts = looks(name for name, _ in runs), []
    scores = scores_of(runs[0][1]) if runs else ()
    for score in (*scores, *LOSSES):
        curves = {name: curve for name, run in runs if (curve := history_curve(run, score)).epochs}
        if curves and score.name not in ("top5", "mean_accuracy"):
            label = f"validation {score.label}" if score in scores else score.label
            chart = curve_chart(look, label, curves, prefix=f"{prefix}-{score.name}", score=score in scores)
            charts.append(chart)
    return charts


def history_curve(run: TrainedRun, score: RunScore) -> TrainingCurve:
    known: list[tuple[int, Any]] = [
        (int(row["epoch"] or 0), value) for row in run.history if (value := value_of(row, score)) is not None
    ]
    values = [value for _, value in known]
    return TrainingCurve([epoch for epoch, _ in known], values, values, values)
