"""Accuracy against cost as data for the page's script: which models, which costs, and which are on the frontier."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mixlab.findings.results import ModelResult
from mixlab.report.costs import show_count, show_mb, show_ms, three_digits
from mixlab.report.report import Report, TrainedRun
from mixlab.report.runs import labels, score_of, scores_of
from mixlab.report.table import show_seeds


@dataclass(frozen=True)
class Axis:
    """A cost to choose. `unit` is how the page writes numbers on it; `less` says that little is good."""

    name: str
    label: str
    unit: str
    less: bool = True


AXES = (
    Axis("latency_ms", "latency", "ms"),
    Axis("macs", "MACs", "count"),
    Axis("params", "parameters", "count"),
    Axis("peak_mb", "peak memory", "MB"),
    Axis("images_per_second", "images/s", "number", less=False),
    Axis("train_flops", "training compute (FLOP)", "count"),
)
SHOWS = {"ms": show_ms, "MB": show_mb, "count": show_count, "number": three_digits}
MEASURED = {"latency_ms", "peak_mb", "images_per_second"}  # these depend on the machine


@dataclass(frozen=True)
class ScatterMark:
    """One model with its score in percent and the costs that are known."""

    name: str
    origin: str
    score: float
    shown: str
    spread: float | None = None
    costs: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Group:
    """Models that were tested on the same data by the same score: only these may share a chart."""

    data: str
    metric: str
    marks: list[ScatterMark] = field(default_factory=list)
    machines: set[str] = field(default_factory=set)

    @property
    def axes(self) -> list[Axis]:
        return [axis for axis in AXES if any(axis.name in mark.costs for mark in self.marks)]

    def plain(self) -> dict[str, Any]:
        """For the page's script. Equal groups give equal data."""
        marks = sorted(self.marks, key=lambda mark: (-mark.score, mark.name, mark.origin))
        return {
            "data": self.data,
            "metric": self.metric,
            "axes": [
                {"name": axis.name, "label": axis.label, "unit": axis.unit, "less": axis.less,
                 "frontier": frontier(marks, axis)}
                for axis in self.axes
            ],
            "marks": [mark_row(mark) for mark in marks],
        }  # fmt: skip


def mark_row(mark: ScatterMark) -> dict[str, Any]:
    known = [axis for axis in AXES if axis.name in mark.costs]
    return {
        "name": mark.name,
        "origin": mark.origin,
        "score": mark.score,
        "shown": mark.shown,
        "spread": mark.spread,
        "costs": {axis.name: mark.costs[axis.name] for axis in known},
        "texts": {axis.label: SHOWS[axis.unit](mark.costs[axis.name]) for axis in known},
    }


def frontier(marks: Sequence[ScatterMark], axis: Axis) -> list[int]:
    """Numbers of the marks that no other beats in score without costing more, cheapest first."""
    sign = 1 if axis.less else -1
    known = [
        (sign * mark.costs[axis.name], -mark.score, index)
        for index, mark in enumerate(marks)
        if axis.name in mark.costs
    ]
    found: list[tuple[float, float, int]] = []
    best = math.inf
    for price, loss, index in sorted(known):
        equal = bool(found) and (price, loss) == found[-1][:2]
        if loss < best or equal:
            found.append((price, loss, index))
            best = loss
    return [index for _, _, index in found]


def groups(report: Report) -> list[Group]:
    """Comparisons and classification runs, by data."""
    found: dict[tuple[str, str], Group] = {}

    def group(data: str, metric: str) -> Group:
        return found.setdefault((data, metric), Group(data, metric))

    for compared in report.comparisons:
        for model in compared.comparison.models:
            mark = model_mark(model, compared.comparison.title)
            if mark is not None:
                own = group(compared.comparison.data, "top-1 %")
                own.marks.append(mark)
                if MEASURED & set(mark.costs):
                    own.machines.add(repr(sorted(compared.comparison.machine.items())))
    names = labels(report.runs)
    for run, name in zip(report.runs, names, strict=True):
        mark = run_mark(run, name)
        if mark is not None:
            group(run.config.data, scores_of(run)[0].label).marks.append(mark)
    return [one for one in found.values() if one.axes]


def model_mark(model: ModelResult, origin: str) -> ScatterMark | None:
    if model.mean is None:
        return None
    costs = {axis.name: getattr(model, axis.name) for axis in AXES if axis.name != "params"}
    known = {"params": model.params + model.frozen, **costs}
    finite = {name: float(value) for name, value in known.items() if value is not None and math.isfinite(value)}
    return ScatterMark(model.name, origin, model.mean, f"{show_seeds(model.top1)}%", model.spread, finite)


def run_mark(run: TrainedRun, name: str) -> ScatterMark | None:
    """By the test split, else by the last validation. Costs are known without measuring or not at all."""
    score = score_of(run, scores_of(run)[0])
    if score is None or run.macs is None or run.params is None:
        return None
    costs = {"params": run.params, "macs": run.macs, "train_flops": run.train_flops}
    known = {cost: float(value) for cost, value in costs.items() if value is not None}
    return ScatterMark(name, run.source, score, f"{score:.2f}%", None, known)
