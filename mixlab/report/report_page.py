"""A report as one HTML file that needs nothing else: what `collect` read, with a chart to ask and tables to sort."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import PurePath
from typing import Any

from mixlab.core.files import write_whole
from mixlab.findings.findings import Finding, show_cell
from mixlab.report.bars import bars_of
from mixlab.report.charts import curve_charts
from mixlab.report.frontier import recommend
from mixlab.report.page import facts, fill, raw, raw_legend
from mixlab.report.page_table import PageRow, PageTable, comparison_table, finding_table, page_cell
from mixlab.report.report import Compared, Instrument, Report, TrainedRun
from mixlab.report.runs import by_task_and_data, labels, run_charts, run_table
from mixlab.report.scatter import groups

KINDS = {  # in the order of the page; the kinds that are not here follow under their own name
    "erf": "Effective receptive fields",
    "robustness": "Robustness",
    "resolution": "Other resolutions",
    "disagree": "Errors that models do not share",
    "kernels": "Learned kernels",
    "truncate": "Truncated kernels",
    "look": "Inside the model",
    "bench": "Speed",
    "bench_mixers": "Mixers against the number of tokens",
    "bench_activations": "Activations",
    "bench_macs": "MACs against resolution",
    "bench_training_compute": "Compute of training",
}
NOT_SET: tuple[Any, ...] = (None, "", [], {})


@dataclass(frozen=True)
class Repeat:
    """How to get something anew, and where it was made."""

    what: str
    command: str
    machine: tuple[tuple[str, str], ...]


def write_report(report: Report, path: str | PathLike[str]) -> None:
    """Equal reports give equal files. The file appears under its name only when it is complete."""
    write_whole(path, render_report(report))


def render_report(report: Report) -> str:
    """The page as text."""
    return fill("report.html", view(report))


def view(report: Report) -> dict[str, Any]:
    """Everything the template shows."""
    charts = groups(report)
    sections, ways = by_kind(report.instruments), repeats(report)
    return {
        "title": report.title,
        "overview": overview(report, sections),
        "groups": [group.plain() for group in charts],
        "several_machines": any(len(group.machines) > 1 for group in charts),
        "comparisons": [comparison_view(index, one) for index, one in enumerate(report.comparisons)],
        "runs": [
            run_view(index, task, data, runs)
            for index, ((task, data), runs) in enumerate(by_task_and_data(report.runs).items())
        ],
        "sections": [section_view(kind, found) for kind, found in sections.items()],
        "repeats": ways,
        "machines": machines(ways),
    }


def by_kind(instruments: Sequence[Instrument]) -> dict[str, list[tuple[str, Instrument]]]:
    """In the order of `KINDS`; each with the id of its place on the page."""
    found: dict[str, list[tuple[str, Instrument]]] = {}
    for index, one in enumerate(instruments):
        found.setdefault(one.finding.kind, []).append((f"finding-{index}", one))
    known = list(KINDS)
    return dict(sorted(found.items(), key=lambda pair: known.index(pair[0]) if pair[0] in KINDS else len(known)))


def kind_title(kind: str) -> str:
    return KINDS.get(kind) or (kind[:1].upper() + kind[1:]).replace("_", " ")


def counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


# -- sections --------------------------------------------------------------------------------------


def overview(report: Report, sections: dict[str, list[tuple[str, Instrument]]]) -> PageTable:
    """What was included, and where on the page it is."""
    rows = []
    for index, one in enumerate(report.comparisons):
        told = f"{counted(len(one.comparison.models), 'model')}, {counted(len(one.comparison.seeds), 'seed')}"
        rows.append((one.comparison.title, "comparison", told, one.source, f"#comparison-{index}"))
    for index, ((task, data), runs) in enumerate(by_task_and_data(report.runs).items()):
        for name, run in runs:
            rows.append(
                (name, f"{task} run", f"{data}{'' if run.finished else ', not finished'}", run.source, f"#runs-{index}")
            )
    for kind, found in sections.items():
        for place, instrument in found:
            counts = (len(instrument.finding.table), "row"), (len(instrument.drawings), "picture")
            told = ", ".join(counted(*one) for one in counts)
            rows.append((instrument.finding.title, kind, told, instrument.source, f"#{place}"))
    heads = ("what", "kind", "content", "from")
    return PageTable(heads, [PageRow([page_cell(text) for text in row[:4]], link=row[4]) for row in rows])


def comparison_view(index: int, compared: Compared) -> dict[str, Any]:
    comparison, prefix = compared.comparison, f"comparison-{index}"
    recommendation = recommend(comparison)
    return {
        "id": prefix,
        "comparison": comparison,
        "recommendation": recommendation,
        "facts": facts(comparison),
        "table": comparison_table(comparison, recommendation.chosen),
        "legend": raw_legend([model.name for model in comparison.ranked()], f"{prefix}-legend"),
        "charts": [raw(chart) for chart in curve_charts(comparison, f"{prefix}-curve")],
    }


def run_view(index: int, task: str, data: str, runs: Sequence[tuple[str, TrainedRun]]) -> dict[str, Any]:
    drawn = [(name, run) for name, run in runs if run.history]
    return {
        "id": f"runs-{index}",
        "title": f"{task.capitalize()} on {data}",
        "table": run_table(runs),
        "waiting": [name for name, run in runs if not run.history],
        "legend": raw_legend([name for name, _ in drawn], f"runs-{index}-legend"),
        "charts": [raw(chart) for chart in run_charts(drawn, f"runs-{index}-curve")],
    }


def section_view(kind: str, found: Sequence[tuple[str, Instrument]]) -> dict[str, Any]:
    return {
        "id": f"kind-{found[0][0]}",
        "title": kind_title(kind),
        "bars": bars_of([one.finding for _, one in found]) if kind == "robustness" else [],
        "findings": [
            {
                "id": place,
                "title": one.finding.title,
                "settings": shown_settings(one.finding),
                "table": finding_table(one.finding)[0],
                "drawings": one.drawings,
            }
            for place, one in found
        ],
    }


def shown_settings(found: Finding) -> dict[str, str]:
    """Nothing of what was not set. What is the same in all rows of a large table stands here instead."""
    values = {**found.settings, **finding_table(found)[1]}
    return {name.replace("_", " "): setting(value) for name, value in values.items() if value not in NOT_SET}


def setting(value: Any) -> str:
    """Lists and mappings without brackets."""
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {setting(part)}" for name, part in value.items())
    if isinstance(value, list):
        return ("; " if any(isinstance(part, dict) for part in value) else ", ").join(setting(part) for part in value)
    return show_cell(value)


# -- how to repeat it ------------------------------------------------------------------------------


def repeats(report: Report) -> list[Repeat]:
    found = [
        Repeat(one.comparison.title, one.comparison.command, pairs(one.comparison.machine))
        for one in report.comparisons
    ]
    for name, run in zip(labels(report.runs), report.runs, strict=True):
        config = str(PurePath(run.source) / "config.json")
        command = shlex.join(["mixlab", "train", "--config", config, "--out", "NEW_FOLDER"])
        found.append(Repeat(f"{name} on {run.config.data}", command, pairs(run.config.about)))
    found += [Repeat(one.finding.title, one.finding.command, pairs(one.finding.machine)) for one in report.instruments]
    return found


def pairs(machine: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(value)) for name, value in machine.items())


def machines(found: Sequence[Repeat]) -> list[tuple[list[str], dict[str, str]]]:
    """Each machine once, with what was made on it."""
    made: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for one in found:
        if one.machine:
            made.setdefault(one.machine, []).append(one.what)
    return [(list(dict.fromkeys(names)), dict(machine)) for machine, names in made.items()]
