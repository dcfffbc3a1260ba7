"""The pictures of a comparison: learning curves, and accuracy against each cost."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mixlab.findings.results import Comparison, ModelResult, Point
from mixlab.findings.svg import INK, SERIES, SHADE, inline_svg, need, style
from mixlab.report.costs import COSTS, CostColumn, short
from mixlab.report.frontier import frontier

SIZE = (5.0, 3.7)  # inches at 72 px: about the width of a phone, so that the text keeps its size there
MARKERS = "osD^vPX*<>"
WIDE = 12.0  # values that differ by more than this factor get a logarithmic axis
PLACES = ((7, "left", 5), (-7, "right", 5), (-7, "right", -4), (7, "left", -13), (-7, "right", -13))  # of a label
EARLY = 0.2  # accuracies before this share of the epochs may leave the picture: the end is what differs


@dataclass(frozen=True)
class ChartStyle:
    """How a model appears in every picture: color and shape by rank, dashes when the colors start anew."""

    color: str
    marker: str
    dashes: str


def looks(names: Iterable[str]) -> dict[str, ChartStyle]:
    return {
        name: ChartStyle(
            SERIES[index % len(SERIES)],
            MARKERS[index % len(MARKERS)],
            ("-", "--", ":", "-.")[index // len(SERIES) % 4],
        )
        for index, name in enumerate(names)
    }


def legend(names: Iterable[str], prefix: str) -> dict[str, str]:
    """The swatch of each name."""
    return {name: swatch(look, f"{prefix}-{index}") for index, (name, look) in enumerate(looks(names).items())}


def swatch(look: ChartStyle, prefix: str) -> str:
    """The entry of a legend: a piece of line with the model's shape."""
    with style():
        figure = need("matplotlib.figure").Figure(figsize=(0.5, 0.2), dpi=72)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set(xlim=(0, 1), ylim=(0, 1))
        axes.plot((0, 1), (0.5, 0.5), look.dashes, color=look.color)
        axes.plot((0.5,), (0.5,), look.marker, color=look.color, markersize=8)
        return inline_svg(figure, prefix, "")


# -- learning curves -----------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingCurve:
    """One value per epoch: mean, lowest and highest over the seeds."""

    epochs: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


def curve_of(model: ModelResult, value: Callable[[Point], float | None]) -> TrainingCurve:
    found: dict[int, list[float]] = {}
    for seed in model.curves:
        for point in seed:
            measured = value(point)
            if measured is not None and abs(measured) < float("inf"):
                found.setdefault(point.epoch, []).append(measured)
    epochs = sorted(found)
    values = [found[epoch] for epoch in epochs]
    return TrainingCurve(
        epochs, [statistics.fmean(v) for v in values], [min(v) for v in values], [max(v) for v in values]
    )


CURVES: dict[str, tuple[str, Callable[[Point], float | None]]] = {
    "top1": ("validation top-1, %", lambda point: point.top1),
    "val-loss": ("validation loss", lambda point: point.val_loss),
    "train-loss": ("training loss", lambda point: point.train_loss),
}


def curve_charts(comparison: Comparison, prefix: str = "curve") -> list[str]:
    """One <svg> for each value that was recorded. `prefix` keeps several comparisons on one page apart."""
    charts, look = [], looks(model.name for model in comparison.ranked())
    for name, (label, value) in CURVES.items():
        curves = {model.name: curve_of(model, value) for model in comparison.ranked()}
        curves = {model: curve for model, curve in curves.items() if curve.epochs}
        if curves:
            charts.append(curve_chart(look, label, curves, prefix=f"{prefix}-{name}", score=name == "top1"))
    return charts


def curve_chart(
    look: Mapping[str, ChartStyle], label: str, curves: dict[str, TrainingCurve], *, prefix: str, score: bool
) -> str:
    """One line for each curve. A `score` is in percent and the higher the better; anything else is a loss."""
    best = max if score else min
    first = best(curves, key=lambda model: curves[model].mean[-1])
    said = f"{label} by epoch for {count_models(len(curves))}; {first} ends best with {curves[first].mean[-1]:.4g}"
    with style():
        figure, axes = new_axes()
        for model, curve in reversed(curves.items()):  # the best on top
            color, dashes = look[model].color, look[model].dashes
            axes.plot(curve.epochs, curve.mean, dashes, color=color)
            axes.plot(curve.epochs[-1:], curve.mean[-1:], look[model].marker, color=color, clip_on=False)
            if curve.low != curve.high:
                axes.fill_between(curve.epochs, curve.low, curve.high, color=color, alpha=0.16, linewidth=0)
        axes.set_xlabel("epoch")
        axes.set_title(label, loc="left", fontsize=12)
        axes.xaxis.set_major_locator(need("matplotlib.ticker").MaxNLocator(6, integer=True))
        epochs = {epoch for curve in curves.values() for epoch in curve.epochs}
        if len(epochs) == 1:
            axes.set_xlim(min(epochs) - 1, min(epochs) + 1)
        if score:
            limit_accuracies(axes, list(curves.values()))
        else:
            spread_axis(axes.yaxis, [value for curve in curves.values() for value in curve.mean])
        return inline_svg(figure, prefix, said)


def limit_accuracies(axes: Any, curves: Sequence[TrainingCurve]) -> None:
    """From the lowest accuracy behind the first epochs: the start of a curve says little and takes the most room."""
    late = [min(curve.low[int(EARLY * len(curve.low)) :]) for curve in curves]
    highest = max(max(curve.high) for curve in curves)
    room = 0.05 * max(highest - min(late), 1.0)
    axes.set_ylim(max(0.0, min(late) - room), min(100.0, highest + room))


# -- accuracy against cost -----------------------------------------------------------------------


def cost_charts(comparison: Comparison, costs: Sequence[str] = ("latency_ms", "macs", "peak_mb")) -> list[str]:
    """One <svg> for each cost that was measured."""
    return [chart for name in costs if (chart := cost_chart(comparison, COSTS[name])) is not None]


def cost_chart(comparison: Comparison, cost: CostColumn) -> str | None:
    known = [
        (price, accuracy, model)
        for model in comparison.ranked()
        if (price := cost.of(model)) is not None and (accuracy := model.mean) is not None
    ]
    if not known:
        return None
    best = frontier(comparison.models, cost.name)
    look = looks(model.name for model in comparison.ranked())
    names = ", ".join(model.name for model in best)
    said = f"top-1 against {cost.label} for {count_models(len(known))}; on the frontier, cheapest first: {names}"
    with style():
        figure, axes = new_axes()
        for price, accuracy, model in known:
            on_frontier = model in best
            axes.errorbar(
                price,
                accuracy,
                yerr=model.spread,
                fmt=look[model.name].marker,
                color=look[model.name].color,
                markersize=8 if on_frontier else 6.5,
                markerfacecolor=look[model.name].color if on_frontier else "none",
                markeredgewidth=1.6,
                elinewidth=1,
                zorder=3,
            )
        axes.margins(0.12, 0.14)
        limit_top1(axes, [accuracy for _, accuracy, _ in known])
        spread_axis(axes.xaxis, [price for price, _, _ in known])
        show_limit(axes, cost.limit(comparison.budget), [price for price, _, _ in known])
        steps = [(price, accuracy) for price, accuracy, model in known if model in best]
        axes.step(*zip(*sorted(steps), strict=True), where="post", color=INK, linewidth=1, alpha=0.55, zorder=2)
        axes.set_title(f"top-1, % against {cost.label}", loc="left", fontsize=12)
        axes.xaxis.set_major_formatter(
            need("matplotlib.ticker").FuncFormatter(lambda value, _: short(cost.show(value)))
        )
        label_points(
            figure, axes, [(price, accuracy, model.name if model in best else "") for price, accuracy, model in known]
        )
        return inline_svg(figure, f"cost-{cost.name}", said)


def limit_top1(axes: Any, accuracies: Sequence[float]) -> None:
    """At least two points of accuracy, so that equals look equal, and no room above 100%."""
    low, high = axes.get_ylim()
    middle = statistics.fmean((min(accuracies), max(accuracies)))
    low, high = (middle - 1, middle + 1) if max(accuracies) == min(accuracies) else (low, high)
    axes.set_ylim(max(low, -2.0), min(high, 100.4))


def show_limit(axes: Any, limit: float | None, prices: Sequence[float]) -> None:
    """A line at the budget and shade beyond it, if it lies anywhere near the models."""
    if limit is None or limit > 2 * max(prices):
        return
    low, high = axes.get_xlim()
    high = max(high, 1.1 * limit)
    axes.axvspan(limit, high, color=SHADE, linewidth=0, zorder=0)
    axes.axvline(limit, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.annotate("budget", (limit, 0.0), (3, 4), xycoords=("data", "axes fraction"), textcoords="offset points")
    axes.set_xlim(min(low, 0.9 * limit), high)


def label_points(figure: Any, axes: Any, points: Sequence[tuple[float, float, str]]) -> None:
    """Names beside the points that have one, where there is room; the legend has them all."""
    figure.draw_without_rendering()
    frame = axes.get_window_extent()
    markers = axes.transData.transform([(x, y) for x, y, _ in points])
    taken: list[Any] = []
    for (x, y, name), own in zip(points, markers, strict=True):
        if not name:
            continue
        for shift, side, height in PLACES:
            text = axes.annotate(name, (x, y), (shift, height), textcoords="offset points", ha=side, fontsize=9.5)
            box = text.get_window_extent().expanded(1.04, 1.1)
            inside = box.x0 >= frame.x0 and box.x1 <= frame.x1 + 4 and box.y0 >= frame.y0 and box.y1 <= frame.y1
            hits = any(box.overlaps(other) for other in taken) or any(
                box.padded(5).contains(*marker) for marker in markers if tuple(marker) != tuple(own)
            )
            if inside and not hits:
                taken.append(box)
                break
            text.remove()


# -- shared --------------------------------------------------------------------------------------


def new_axes() -> tuple[Any, Any]:
    figure = need("matplotlib.figure").Figure(figsize=SIZE, dpi=72, layout="constrained")
    return figure, figure.add_subplot()


def spread_axis(axis: Any, values: Sequence[float]) -> None:
    """Logarithmic, with readable ticks, where the values span more than an order of magnitude."""
    ticker = need("matplotlib.ticker")
    if min(values) > 0 and max(values) / min(values) > WIDE:
        getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
        axis.set_major_locator(ticker.LogLocator(subs=(1.0, 3.0)))
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(ticker.NullLocator())
    else:
        axis.set_major_locator(ticker.MaxNLocator(5))


def count_models(count: int) -> str:
    return "1 model" if count == 1 else f"{count} models"
