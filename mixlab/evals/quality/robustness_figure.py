"""The pictures of robustness: error per corruption, accuracy against severity, accuracy against epsilon."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mixlab.evals.quality.corruptions import short_name
from mixlab.findings.findings import figure, legend_below

MARKERS = "osD^vPX*<>"
Drawn = dict[str, tuple[str, Any]]  # name: caption and figure
Models = Mapping[str, Mapping[str, Any]]  # `Result.plain()` by name


def draw(models: Models) -> Drawn:
    """The pictures that there are numbers for."""
    found: Drawn = {}
    first = next(iter(models.values()))
    if first["corruptions"]:
        found["robustness-corruptions"] = ("Error per corruption, mean over severities.", corruption_bars(models))
        found["robustness-severity"] = ("Accuracy against severity, mean over corruptions.", severity_lines(models))
    if first["attacks"]:
        found["robustness-epsilon"] = ("Accuracy against the largest change of a pixel.", epsilon_lines(models))
    return found


def corruption_bars(models: Models) -> Any:
    names = list(next(iter(models.values()))["corruptions"])
    drawn = figure(min(12.0, max(5.0, 1.6 + 0.25 * len(names) * (1 + len(models)))), 4.2)
    axes = drawn.subplots()
    width = 0.8 / len(models)
    for number, (model, found) in enumerate(models.items()):
        errors = [np.mean([100 - score["top1"] for score in found["corruptions"][name].values()]) for name in names]
        axes.bar(np.arange(len(names)) - 0.4 + (number + 0.5) * width, errors, width, label=model)
    if next(iter(models.values()))["clean"] is not None:
        for number, found in enumerate(models.values()):
            axes.axhline(100 - found["clean"]["top1"], color=f"C{number}", linewidth=1, linestyle="--")
        axes.set_title("dashed: error on clean images", fontsize="small", loc="right")
    axes.set(ylabel="error, %", xlim=(-0.6, len(names) - 0.4), ylim=(0, 100))
    axes.set_xticks(np.arange(len(names)), [short_name(name) for name in names], rotation=60, ha="right")
    return finish(drawn, axes)


def severity_lines(models: Models) -> Any:
    drawn = figure()
    axes = drawn.subplots()
    for number, (model, found) in enumerate(models.items()):
        rows = list(found["corruptions"].values())
        severities = sorted(rows[0], key=int)
        points = [(int(severity), np.mean([row[severity]["top1"] for row in rows])) for severity in severities]
        if found["clean"] is not None:
            points = [(0, found["clean"]["top1"]), *points]
        axes.plot(*zip(*points, strict=True), MARKERS[number % len(MARKERS)] + "-", label=model)
    axes.set(xlabel="severity (0: clean)", ylabel="top-1, %", ylim=(0, 100))
    axes.set_xticks(range(6))
    return finish(drawn, axes)


def epsilon_lines(models: Models) -> Any:
    drawn = figure()
    axes = drawn.subplots()
    for number, (model, found) in enumerate(models.items()):
        kinds = dict.fromkeys(row["kind"] for row in found["attacks"])
        for kind, dashes in zip(kinds, ("-", "--"), strict=False):
            points = sorted((row["epsilon"], row["top1"]) for row in found["attacks"] if row["kind"] == kind)
            style = MARKERS[number % len(MARKERS)] + dashes
            axes.plot(*zip(*points, strict=True), style, color=f"C{number}", label=f"{model}, {kind.upper()}")
    axes.set(xlabel="epsilon, of 255 levels", ylabel="top-1, %", ylim=(0, 100))
    return finish(drawn, axes)


def finish(drawn: Any, axes: Any) -> Any:
    axes.grid(axis="y", linewidth=0.5, alpha=0.5)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    legend_below(drawn, side="left", fontsize="small")
    return drawn
