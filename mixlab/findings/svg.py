"""Matplotlib figures as inline SVG that takes its colors from the page, so that one picture serves light and dark."""

import html
import importlib
import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mixlab.core.errors import MixlabError

INK, FAINT, SHADE = "#010101", "#010102", "#010103"  # stand-ins that become variables of the page's style sheet
SERIES = tuple(f"#0102{index:02x}" for index in range(10))
VARIABLES = {INK: "--ink", FAINT: "--faint", SHADE: "--shade"} | {
    color: f"--series-{index}" for index, color in enumerate(SERIES)
}
STYLE = {
    "svg.hashsalt": "mixlab",
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # names may hold dollar signs
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.8,
}


def need(module: str) -> Any:
    """A library that only pages need."""

    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = {"jinja2": "Jinja2"}.get(module, module.partition(".")[0])
        raise MixlabError(f"A page needs {library}, which is not installed: pip install 'mixlab[train]'") from error


@contextmanager
def style() -> Iterator[None]:
    """The same look whatever the user's own settings of matplotlib are."""
    with need("matplotlib.style").context(["default", STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser has fonts for the names
        yield


def inline_svg(figure: Any, prefix: str, label: str) -> str:
    """A figure as an <svg> element that scales with its box; without a label it is decoration.

    `prefix` keeps its ids apart from those of other figures.
    """
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*|<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'href="#', f'href="#{prefix}-', text)
    text = re.sub(r"url\(#", f"url(#{prefix}-", text)
    for color, variable in VARIABLES.items():
        text = text.replace(color, f"var({variable})")
    text = re.sub(r"font: (?:\w+ )?([\d.]+)px [^;\"]*", r"font: \1px var(--font)", text)
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    role = f'role="img" aria-label="{html.escape(label)}"' if label else 'aria-hidden="true"'
    return f"<svg {box[0]} {role}>{text[text.index('>') + 1 :]}"
