"""The pictures of `mixlab bench`: bars of throughput, and costs against size with their slopes."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mixlab.findings.findings import figure
from mixlab.findings.svg import need

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f5539", "#5f5f5f")
MARKERS = "osD^vPX*"
DASHES = ("-", "--", ":")  # when the colours start anew
BAR = 0.28  # inches
ROOM = 1.5  # times the longest bar: for the text behind it


@contextmanager
def plain_style() -> Iterator[None]:
    """The same look whatever the user's own settings of matplotlib are; names may hold dollar signs."""
    with need("matplotlib.style").context(["default", {"text.parse_math": False, "svg.fonttype": "none"}]):
        yield


@dataclass(frozen=True)
class Curve:
    """Costs against size. The colour goes with the name, the label into the legend."""

    name: str
    label: str
    sizes: Sequence[float]
    costs: Sequence[float]


def tidy(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)


# -- bars ----------------------------------------------------------------------------------------


def bars(
    title: str, groups: Mapping[str, Sequence[tuple[str, float, str]]], unit: str, colours: Mapping[str, str]
) -> Any:
    """Horizontal bars in groups: of each a name, a value and a text behind it. The colour goes with the name."""
    count = sum(len(entries) + 1 for entries in groups.values())
    values = [value for entries in groups.values() for _, value, _ in entries]
    with plain_style():
        drawn = figure(7.2, 0.9 + BAR * count)
        axes = drawn.add_subplot()
        place, places, names = 0.0, [], []
        for heading, entries in groups.items():
            words = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
            axes.annotate(heading, (0, place), (4, 0), **words, fontsize=9, va="center", weight="bold")
            for name, value, text in entries:
                place += 1
                axes.barh(place, value, 0.72, color=colours[name])
                axes.annotate(text, (value, place), (4, 0), textcoords="offset points", va="center", fontsize=8.5)
                places.append(place)
                names.append(name)
            place += 1.25
        axes.set_yticks(places, names, fontsize=9)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(place - 0.4, -0.7)
        axes.set_xlim(0, ROOM * max(values))
        axes.grid(axis="x", linewidth=0.5, color="#dddddd")
        axes.set_xlabel(unit, fontsize=9)
        tidy(axes, title)
        return drawn


def colours_of(names: Sequence[str]) -> dict[str, str]:
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(dict.fromkeys(names))}


def throughput_bars(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Images per second by setting; nothing where nothing ran. The text has the spread, and the ratio to a peer."""
    ran = [row for row in rows if row["images_per_second"] is not None]
    groups: dict[str, list[tuple[str, float, str]]] = {}
    for row in ran:
        speed = row["images_per_second"]
        text = f"{speed:.3g} (spread {row['spread']:.0%})"
        text += "" if row["ratio"] is None else f", {row['ratio']:.2f} x {row['against']}"
        groups.setdefault(setting_of(row), []).append((row["model"], speed, text))
    if not groups:
        return {}
    colours = colours_of([row["model"] for row in ran])
    return {"throughput": bars("Throughput of the best run", groups, "images per second", colours)}


def setting_of(row: Mapping[str, Any]) -> str:
    height, width = row["image_size"]
    words = [row["mode"], f"{height} x {width} px", f"batch {row['batch']}", row["dtype"]]
    words += [] if row["layout"] == "contiguous" else [row["layout"]]
    words += [f"with {row['optimizer']}"] if row["optimizer"] != "none" else []
    return ", ".join([*words, "compiled"] if row["compiled"] else words)


# -- curves --------------------------------------------------------------------------------------


def scaling_curves(panels: Mapping[str, Sequence[Curve]], sizes: str, guides: Sequence[int] = ()) -> Any:
    """Costs against size, both logarithmic, a panel per kind of cost; `guides` are slopes drawn as dotted lines."""
    names = list(dict.fromkeys(curve.name for curves in panels.values() for curve in curves))
    with plain_style():
        entries = max(len(curves) for curves in panels.values()) + len(guides)
        drawn = figure(6.4 * len(panels), 4.4 + 0.11 * entries)
        for index, (title, curves) in enumerate(panels.items()):
            axes = drawn.add_subplot(1, len(panels), index + 1)
            for curve in curves:
                number = names.index(curve.name)
                colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
                look = {"color": colour, "marker": marker, "linestyle": DASHES[number // len(COLOURS) % len(DASHES)]}
                axes.plot(curve.sizes, curve.costs, **look, markersize=4.5, label=curve.label)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            draw_guides(axes, curves, guides)
            label_sizes(axes, sorted({size for curve in curves for size in curve.sizes}))
            axes.set_xlabel(sizes, fontsize=9)
            axes.grid(linewidth=0.5, color="#dddddd")
            axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
            tidy(axes, title)
        return drawn


def draw_guides(axes: Any, curves: Sequence[Curve], slopes: Sequence[int]) -> None:
    """From the middle of what the smallest size costs, so that slopes can be compared by eye."""
    sizes = [size for curve in curves for size in curve.sizes]
    if not sizes or min(sizes) == max(sizes):
        return
    low, high = axes.get_ylim()
    start = statistics.median(curve.costs[0] for curve in curves)
    for slope in slopes:
        end = start * (max(sizes) / min(sizes)) ** slope
        axes.plot([min(sizes), max(sizes)], [start, end], ":", color="#888888", linewidth=1, label=f"slope {slope}")
    axes.set_ylim(low, high)


def label_sizes(axes: Any, sizes: Sequence[float]) -> None:
    ticker = need("matplotlib.ticker")
    few = sizes if len(sizes) <= 9 else sizes[:: -(-len(sizes) // 9)]
    axes.xaxis.set_major_locator(ticker.FixedLocator(list(few)))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.tick_params(labelsize=8)
