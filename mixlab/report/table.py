"""A comparison as a table: for the terminal, Markdown, and CSV for programs."""

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike

from mixlab.core.files import write_whole
from mixlab.findings.results import Comparison, ModelResult, mean, spread
from mixlab.report.costs import show_count, show_mb, show_ms, show_time, three_digits

MISSING = "-"


@dataclass(frozen=True)
class Column:
    """`best` says which end of the values is the good one."""

    label: str
    value: Callable[[ModelResult], float | None]
    show: Callable[[ModelResult, float], str]
    best: Callable[..., float]


def show_seeds(values: tuple[float, ...]) -> str:
    """Mean and, with several seeds, their standard deviation."""
    average, deviation = mean(values), spread(values)
    if average is None:
        return MISSING
    return f"{average:.2f}" if deviation is None else f"{average:.2f} ± {deviation:.2f}"


def show_params(model: ModelResult, value: float) -> str:
    return show_count(model.params) + (f" + {show_count(model.frozen)}" if model.frozen else "")


COLUMNS = (
    Column("top-1 %", lambda model: model.mean, lambda model, _: show_seeds(model.top1), max),
    Column("top-5 %", lambda model: mean(model.top5), lambda model, _: show_seeds(model.top5), max),
    Column("parameters", lambda model: model.params + model.frozen, show_params, min),
    Column("MACs", lambda model: model.macs, lambda _, value: show_count(value), min),
    Column("images/s", lambda model: model.images_per_second, lambda _, value: three_digits(value), max),
    Column("latency", lambda model: model.latency_ms, lambda _, value: show_ms(value), min),
    Column("peak memory", lambda model: model.peak_mb, lambda _, value: show_mb(value), min),
    Column("training", lambda model: model.train_seconds, lambda _, value: show_time(value), min),
)


@dataclass(frozen=True)
class TableCell:
    text: str
    value: float | None
    best: bool


def columns_of(comparison: Comparison) -> list[Column]:
    """Those with a value for at least one model."""
    return [column for column in COLUMNS if any(column.value(model) is not None for model in comparison.models)]


def cells(comparison: Comparison) -> dict[str, list[TableCell]]:
    """A row per model, most accurate first. What shows as the best value is marked, unless there is one model."""
    rows: dict[str, list[TableCell]] = {model.name: [] for model in comparison.ranked()}
    for column in columns_of(comparison):
        known = [value for model in comparison.models if (value := column.value(model)) is not None]
        best = column.best(known)
        for model in comparison.ranked():
            value = column.value(model)
            text = MISSING if value is None else column.show(model, value)
            rows[model.name].append(TableCell(text, value, value == best and len(comparison.models) > 1))
    return rows


def comparison_rows(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """The header, and a row of texts per model, most accurate first."""
    header = ["model", *(column.label for column in columns_of(comparison))]
    return header, [[name, *(cell.text for cell in row)] for name, row in cells(comparison).items()]


def markdown_text(comparison: Comparison) -> str:
    """Best values are bold."""
    header, _ = comparison_rows(comparison)
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    for name, row in cells(comparison).items():
        lines.append([name.replace("|", "\\|"), *(f"**{cell.text}**" if cell.best else cell.text for cell in row)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def csv_text(comparison: Comparison) -> str:
    """Plain numbers in the units of `ModelResult`, every column, empty where nothing was measured."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    costs = ("params", "frozen", "macs", "images_per_second", "latency_ms", "peak_mb", "train_seconds", "train_flops")
    writer.writerow(["model", "top1", "top1_spread", "top5", "top5_spread", "seeds", *costs])
    for model in comparison.ranked():
        accuracies = (model.mean, model.spread, mean(model.top5), spread(model.top5), len(model.top1))
        writer.writerow([model.name, *accuracies, *(getattr(model, cost) for cost in costs)])
    return out.getvalue()


def write_markdown(comparison: Comparison, path: str | PathLike[str]) -> None:
    write_whole(path, markdown_text(comparison))


def write_csv(comparison: Comparison, path: str | PathLike[str]) -> None:
    write_whole(path, csv_text(comparison))
