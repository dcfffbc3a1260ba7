"""A comparison as one HTML file that needs nothing else: no network, no scripts but one that sorts the table."""

from importlib import resources
from os import PathLike
from typing import Any

from mixlab.files import write_whole
from mixlab.report.charts import cost_charts, curve_charts, looks, swatch
from mixlab.report.frontier import recommend, show_budget
from mixlab.report.results import Comparison
from mixlab.report.svg import need
from mixlab.report.table import cells, columns_of


def write_page(comparison: Comparison, path: str | PathLike[str]) -> None:
    """Equal comparisons give equal files. The file appears under its name only when it is complete."""
    write_whole(path, render_page(comparison))


def render_page(comparison: Comparison) -> str:
    """The page as text."""
    jinja2, markup = need("jinja2"), need("markupsafe").Markup
    source = (resources.files("mixlab") / "report" / "compare.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text: str = environment.from_string(source).render(view(comparison, markup))
    return text


def view(comparison: Comparison, markup: Any) -> dict[str, Any]:
    """Everything the template shows. `markup` marks what is HTML already."""
    ranked = comparison.ranked()
    legends = {
        place: {
            name: markup(swatch(look, f"legend-{place}-{index}"))
            for index, (name, look) in enumerate(looks(ranked).items())
        }
        for place in ("costs", "curves")
    }
    return {
        "comparison": comparison,
        "recommendation": recommend(comparison),
        "facts": facts(comparison),
        "columns": columns_of(comparison),
        "rows": cells(comparison),
        "legends": legends,
        "cost_charts": [markup(chart) for chart in cost_charts(comparison)],
        "curve_charts": [markup(chart) for chart in curve_charts(comparison)],
    }


def facts(comparison: Comparison) -> dict[str, str]:
    """What was done, for the line under the title and the section on repeating it."""
    height, width = comparison.image_size
    seeds = ", ".join(str(seed) for seed in comparison.seeds)
    found = {
        "data": comparison.data,
        "recipe": comparison.recipe,
        "image size": f"{height} x {width} px",
        "epochs": str(comparison.epochs),
        "seeds" if len(comparison.seeds) != 1 else "seed": seeds,
        "test images": str(comparison.test_images or ""),
        "budget": show_budget(comparison.budget) or "none",
    }
    return {name: value for name, value in found.items() if value}
