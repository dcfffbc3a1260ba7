"""A comparison as one HTML file that needs nothing else: no network, and a script only for sorting and the theme."""

from importlib import resources
from os import PathLike
from typing import Any

from mixlab.core.files import write_whole
from mixlab.findings.results import Comparison
from mixlab.findings.svg import need
from mixlab.report.charts import cost_charts, curve_charts, legend
from mixlab.report.frontier import recommend, show_budget
from mixlab.report.page_table import comparison_table


def write_page(comparison: Comparison, path: str | PathLike[str]) -> None:
    """Equal comparisons give equal files. The file appears under its name only when it is complete."""
    write_whole(path, render_page(comparison))


def render_page(comparison: Comparison) -> str:
    """The page as text."""
    return fill("compare.html", view(comparison))


def fill(name: str, values: dict[str, Any]) -> str:
    """A template of this folder with its values in place; every text is escaped."""
    jinja2 = need("jinja2")
    folder = resources.files("mixlab") / "report"
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda part: (folder / part).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text: str = environment.get_template(name).render(values)
    return text


def raw(text: str) -> Any:
    """Marks what is HTML already."""
    return need("markupsafe").Markup(text)


def view(comparison: Comparison) -> dict[str, Any]:
    """Everything the template shows."""
    names = [model.name for model in comparison.ranked()]
    recommendation = recommend(comparison)
    return {
        "comparison": comparison,
        "recommendation": recommendation,
        "facts": facts(comparison),
        "table": comparison_table(comparison, recommendation.chosen),
        "legends": {place: raw_legend(names, f"legend-{place}") for place in ("costs", "curves")},
        "cost_charts": [raw(chart) for chart in cost_charts(comparison)],
        "curve_charts": [raw(chart) for chart in curve_charts(comparison)],
    }


def raw_legend(names: list[str], prefix: str) -> dict[str, Any]:
    return {name: raw(mark) for name, mark in legend(names, prefix).items()}


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
