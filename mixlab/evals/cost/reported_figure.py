"""A picture of the papers' accuracies against costs: one panel for each cost, one mark for each row of a table."""

import collections
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from mixlab.evals.cost.bench_figures import COLORS, MARKERS, plain_style, tidy
from mixlab.evals.cost.reported import ReportedPoint
from mixlab.findings.findings import figure, legend_below
from mixlab.findings.svg import need

USUAL_SIDE = 224  # px; other sizes are written beside their marks
GRAY = "#5f5f5f"
FAMILY_COLORS = (*COLORS, "#882255", "#332288", "#999933", "#000000")
PANEL_WIDTH, PANEL_HEIGHT = 6.4, 6.2  # inches
MARK = {"markersize": 5, "linewidth": 0.9}
LABEL_ROOM = (14, 9)  # points that a label takes
LABEL_PLACES = ((5, 4), (5, -6), (-19, 4), (-19, -6), (-7, 9), (-7, -9))  # points from its mark, the best first
LEGEND_COLUMNS = 3  # for each panel
LEGEND_ROW = 0.19  # inches


@dataclass(frozen=True)
class CostAxis:
    """What one panel has along its x axis."""

    name: str
    label: str
    of: Callable[[ReportedPoint], float | None]


PARAMS = CostAxis("params", "parameters, millions", lambda point: point.params / 1e6)
MACS = CostAxis("macs", "multiply-accumulates, billions", lambda point: point.macs / 1e9)
SPEED = CostAxis("images_per_second", "images/s", attrgetter("images_per_second"))


def costs_shown(points: Sequence[ReportedPoint]) -> list[CostAxis]:
    """Throughput has a panel if some model has one."""
    measured = any(point.images_per_second is not None for point in points)
    return [PARAMS, MACS, SPEED] if measured else [PARAMS, MACS]


def looks_of(points: Sequence[ReportedPoint]) -> dict[str, tuple[str, str]]:
    """Color and marker of each family: those with the most marks get colors of their own."""
    marks = collections.Counter(point.family for point in points)
    count = len(FAMILY_COLORS)
    looks = {
        family: (FAMILY_COLORS[index % count], MARKERS[(index + index // count) % len(MARKERS)])
        for index, (family, _) in enumerate(marks.most_common())
    }
    return {family: looks[family] for family in sorted(looks)}


def draw_reported(points: Sequence[ReportedPoint], *, speed_label: str = SPEED.label) -> Any:
    """Top-1 against each cost. Hollow marks were pretrained on a larger dataset; dashed lines are of unusual sizes."""
    looks, costs = looks_of(points), costs_shown(points)
    columns = LEGEND_COLUMNS * len(costs)
    with plain_style():
        drawn = figure(PANEL_WIDTH * len(costs), PANEL_HEIGHT + LEGEND_ROW * (len(looks) // columns + 1))
        panels = drawn.subplots(1, len(costs), sharey=True)
        for axes, cost in zip(panels, costs, strict=True):
            for line in lines_of(points):
                draw_line(axes, line, cost, *looks[line[0].family])
            finish(axes, speed_label if cost is SPEED else cost.label)
        panels[0].set_ylabel("ImageNet-1K top-1 as the papers report it, %", fontsize=9)
        words = {"ncols": columns, "fontsize": 8, "handlelength": 1.6, "columnspacing": 1.2}
        legend_below(drawn, handles=handles_of(points, looks), side="center", **words)
        drawn.draw_without_rendering()  # from here on it is known where the marks are
        for axes, cost in zip(panels, costs, strict=True):
            write_sizes(axes, points, cost, looks)
        return drawn


def lines_of(points: Sequence[ReportedPoint]) -> list[list[ReportedPoint]]:
    """Models of one family, image size and pretraining, the smallest first; an ablation stands alone."""

    def group(point: ReportedPoint) -> tuple[str, int, str, str]:
        return point.family, point.image_size, point.pretraining or "", point.model if point.changed else ""

    ordered = sorted(points, key=lambda point: (group(point), point.params))
    return [list(line) for _, line in itertools.groupby(ordered, group)]


def places_of(line: Sequence[ReportedPoint], cost: CostAxis) -> list[tuple[float, float]]:
    return [(price, point.top1) for point in line if (price := cost.of(point)) is not None]


def draw_line(axes: Any, line: Sequence[ReportedPoint], cost: CostAxis, color: str, marker: str) -> None:
    """One line through the models whose cost is known."""
    places = places_of(line, cost)
    face, dashes = "white" if line[0].pretraining else color, "-" if line[0].image_size == USUAL_SIDE else "--"
    if places:
        look = {"color": color, "marker": marker, "markerfacecolor": face, "linestyle": dashes}
        axes.plot(*zip(*places, strict=True), **look, **MARK)


def write_sizes(
    axes: Any, points: Sequence[ReportedPoint], cost: CostAxis, looks: Mapping[str, tuple[str, str]]
) -> None:
    """The image size of each unusual line beside its last mark, where it covers the fewest marks and other sizes."""
    lines = [(line, places) for line in lines_of(points) if (places := places_of(line, cost))]
    marks = [on_paper(axes, place) for _, places in lines for place in places]
    written: list[tuple[float, float]] = []
    for line, places in lines:
        if line[0].image_size == USUAL_SIDE:
            continue
        x, y = on_paper(axes, places[-1])
        middles = {(right, up): (x + right + LABEL_ROOM[0] / 2, y + up) for right, up in LABEL_PLACES}
        offset = min(middles, key=lambda place: (near(middles[place], written, 1), near(middles[place], marks, 0.7)))
        written.append(middles[offset])
        words = {"fontsize": 7, "color": looks[line[0].family][0], "va": "center", "textcoords": "offset points"}
        axes.annotate(str(line[0].image_size), places[-1], offset, **words)


def on_paper(axes: Any, place: tuple[float, float]) -> tuple[float, float]:
    """In points."""
    x, y = axes.transData.transform(place) * 72 / axes.figure.dpi
    return float(x), float(y)


def near(middle: tuple[float, float], others: Sequence[tuple[float, float]], share: float) -> int:
    """How many others lie within this share of a label's room."""
    width, height = (share * side for side in LABEL_ROOM)
    return sum(abs(middle[0] - x) < width and abs(middle[1] - y) < height for x, y in others)


def finish(axes: Any, label: str) -> None:
    ticker = need("matplotlib.ticker")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 3, 5, 7)))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.tick_params(labelsize=8)
    axes.grid(linewidth=0.5, color="#dddddd")
    axes.margins(x=0.08)
    tidy(axes, label)


def handles_of(points: Sequence[ReportedPoint], looks: Mapping[str, tuple[str, str]]) -> list[Any]:
    """The families, and what hollow marks and dashed lines mean if there are any."""
    line = need("matplotlib.lines").Line2D
    handles = [line([], [], color=color, marker=marker, label=name, **MARK) for name, (color, marker) in looks.items()]
    if any(point.image_size != USUAL_SIDE for point in points):
        label = f"image size beside the mark, else {USUAL_SIDE} px"
        handles.append(line([], [], color=GRAY, linestyle="--", label=label, **MARK))
    for dataset in sorted({point.pretraining for point in points if point.pretraining}):
        look = {"color": GRAY, "marker": "o", "markerfacecolor": "white", "linestyle": "", **MARK}
        handles.append(line([], [], **look, label=f"hollow: pretrained on {dataset}"))
    return handles
