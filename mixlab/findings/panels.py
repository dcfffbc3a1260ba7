"""Sheets of small pictures: images, maps over images, kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mixlab.findings.findings import figure
from mixlab.findings.svg import need

Array = np.ndarray[Any, Any]
PANEL = 1.5  # inches of the longer side of a panel
TITLE = 0.3  # inches for two lines above a panel
HEAD = 0.25  # inches for the title of a sheet
GAP = 0.06  # inches between panels
VEIL = 0.55  # how much of an image a map over it hides
OUTLIERS = 99.5  # the percentile of the magnitudes that a signed map shows in full color


@dataclass(frozen=True, eq=False)
class Panel:
    """A picture with a title. `values` are (H, W, 3) in [0, 1] for an image, else (h, w) of any range.

    "heat" goes from the least to the largest value, "share" from 0 to 1, "signed" is white at zero. `over` is the image
    that a map lies on; the map is stretched to it. `mark`: a place on an image, from the top and left as shares.
    """

    title: str
    values: Array
    kind: Literal["image", "heat", "share", "signed"]
    over: Array | None = None
    mark: tuple[float, float] | None = None


def draw_sheet(rows: Sequence[Sequence[Panel]], title: str = "") -> Any:
    """A figure of rows of panels; rows may have different lengths."""
    columns = max(len(row) for row in rows)
    height, width = panel_size([panel for row in rows for panel in row])
    head = HEAD if title else 0.0
    total = (columns * (width + GAP) + GAP, len(rows) * (height + TITLE + GAP) + GAP + head)
    sheet = figure(*total)
    sheet.set_layout_engine("none")  # every place is known
    for row, panels in enumerate(rows):
        for column, panel in enumerate(panels):
            left, bottom = GAP + column * (width + GAP), total[1] - head - (row + 1) * (height + TITLE + GAP)
            place = (left / total[0], bottom / total[1], width / total[0], height / total[1])
            draw_panel(sheet.add_axes(place), panel)
    if title:
        sheet.text(GAP / total[0], 1 - HEAD / 2 / total[1], title, fontsize=9, va="center", parse_math=False)
    return sheet


def panel_size(panels: Sequence[Panel]) -> tuple[float, float]:
    """Inches for panels of the commonest proportions."""
    shown = next((panel for panel in panels if panel.kind == "image"), panels[0])
    picture = shown.values if shown.over is None else shown.over
    height, width = picture.shape[:2]
    return PANEL * height / max(height, width), PANEL * width / max(height, width)


def draw_panel(axes: Any, panel: Panel) -> None:
    axes.set_axis_off()
    axes.set_title(panel.title, fontsize=6.5, pad=2, parse_math=False)  # of a file or class
    if panel.kind == "image":
        axes.imshow(panel.values.clip(0, 1), interpolation="nearest")
        if panel.mark is not None:
            height, width = panel.values.shape[:2]
            place = ([panel.mark[1] * width - 0.5], [panel.mark[0] * height - 0.5])
            axes.plot(*place, "+", color="white", markersize=9, markeredgewidth=2.5)
            axes.plot(*place, "+", color="red", markersize=8, markeredgewidth=1.2)
        return
    look: dict[str, Any] = {"cmap": "inferno", **limits(panel)}
    if panel.kind == "signed":
        look["cmap"] = "RdBu_r"
    if panel.over is None:
        axes.imshow(panel.values, interpolation="nearest", **look)
        return
    height, width = panel.over.shape[:2]
    box = (-0.5, width - 0.5, height - 0.5, -0.5)
    axes.imshow(gray(panel.over), cmap="gray", vmin=0, vmax=1, extent=box)
    smooth = "nearest" if min(panel.values.shape) < 2 else "bilinear"
    axes.imshow(panel.values, extent=box, alpha=VEIL, interpolation=smooth, **look)


def limits(panel: Panel) -> dict[str, float]:
    values = panel.values
    if panel.kind == "share":
        return {"vmin": 0.0, "vmax": 1.0}
    if panel.kind == "signed":
        most = float(np.percentile(np.abs(values), OUTLIERS)) or float(np.abs(values).max()) or 1.0
        return {"vmin": -most, "vmax": most}
    low, high = float(values.min()), float(values.max())
    return {"vmin": low, "vmax": high if high > low else low + 1.0}


def gray(image: Array) -> Array:
    """Lightness of an RGB image in [0, 1]."""
    lightness: Array = image.clip(0, 1) @ np.array([0.299, 0.587, 0.114])
    return lightness


def wrapped(panels: Sequence[Panel], columns: int) -> list[list[Panel]]:
    """One list of panels as rows of so many."""
    return [list(panels[start : start + columns]) for start in range(0, len(panels), columns)]


def line_chart(
    lines: dict[str, tuple[Sequence[float], Sequence[float]]], *, x: str, y: str, ticks: Sequence[str] | None = None
) -> Any:
    """Named lines with markers. `ticks` are the names of the places 0, 1, ... on the x axis."""
    chart = figure(6.4, 3.6)
    axes = chart.add_subplot()
    for index, (name, (places, values)) in enumerate(lines.items()):
        axes.plot(places, values, marker="osD^vPX*"[index % 8], markersize=4, linewidth=1.5, label=name)
    axes.set(xlabel=x, ylabel=y)
    if ticks is not None:
        axes.set_xticks(range(len(ticks)), ticks, rotation=90 if len(ticks) > 12 else 0, fontsize=7)
    else:
        axes.xaxis.set_major_locator(need("matplotlib.ticker").MaxNLocator(8))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(lines) > 1:
        axes.legend(fontsize=8, frameon=False)
    return chart
