"""The rows of every table, from the named models and from `tables`."""

import re
from collections.abc import Iterator
from typing import Any, Protocol

from mixlab.models.config import Reported
from mixlab.models.papers import OTHER, papers
from mixlab.models.zoo import ensemble_row, model_config, rows
from tools.reproduce.sections import (
    Accuracies,
    Counts,
    Ensembles,
    Measurements,
    Row,
    TransferRow,
    Transfers,
)
from tools.reproduce.tables import Ablation, Line, PaperTables, paper_tables
from tools.reproduce.trainings import Printed, Training, training_of


class Part(Protocol):
    """A part of a table's section."""

    def lines(self, printed: Printed) -> list[str]: ...


def sections_of(paper: str) -> dict[str, list[Part]]:
    """The tables and then the figures of a paper by title, each with its parts in order."""
    tables = paper_tables()[paper]
    sections: dict[str, list[Part]] = {}
    for title, part in (*accuracies_of(paper, tables), *transfers_of(tables), *measurements_of(tables)):
        sections.setdefault(title, []).append(part)
    return dict(sorted(sections.items(), key=lambda section: in_order(section[0])))


def in_order(title: str) -> list[Any]:
    """Tables before figures, 9 before 10, and 2a before 2b; parts of a table stay as they come."""
    kind, number, letter = re.findall(r"^(\w+?)s? (\d+)(\w?)", title)[0]
    return [kind == "Figure", int(number), letter]


def accuracies_of(paper: str, tables: PaperTables) -> Iterator[tuple[str, Part]]:
    """What is trained on ImageNet, what is only counted, and ensembles."""
    by_table: dict[str, list[Row]] = {}
    for table, row in (*model_rows(paper), *ablation_rows(tables)):
        by_table.setdefault(table, []).append(row)
    for table, listed in by_table.items():
        ensembles = [row for row in listed if ensemble_row(row.model)]
        trained = [row for row in listed if row not in ensembles and row.reported.top1 is not None]
        counted = [row for row in listed if row.reported.top1 is None]
        if trained:
            yield table, Accuracies(table=table, rows=trained, evaluate=tables.evaluate)
        if ensembles:
            yield table, Ensembles(rows=ensembles)
        if counted:
            yield table, Counts(rows=counted)


def model_rows(paper: str) -> Iterator[tuple[str, Row]]:
    """Rows of named models, which stand with the models."""
    titles = {about.title.split(":")[0]: key for key, about in papers().items()}
    for name in rows():
        ensemble = ensemble_row(name)
        about = ensemble or model_config(name)
        for reported in about.reported:
            other, _, table = reported.table.rpartition(", ")  # "HyenaPixel, Table 3" stands in another family's file
            if paper != (titles[other] if other else OTHER.get(about.family, about.family)):
                continue
            size, larger = reported.image_size, reported.pretraining
            training = Training(model=name, phases=()) if ensemble else training_of(name, size, larger)
            yield table, Row(model=name, reported=reported, training=training)


def ablation_rows(tables: PaperTables) -> Iterator[tuple[str, Row]]:
    """Rows that change a named model."""
    for ablation in tables.ablations:
        for line in ablation.lines:
            reported = Reported(table=ablation.table, top1=line.top1, macs=line.macs)
            training = training_of_line(ablation, line)
            yield ablation.table, Row(model=ablation.model, reported=reported, training=training, what=line.what)


def training_of_line(ablation: Ablation, line: Line) -> Training:
    folder = line.folder or (re.sub("[^a-z0-9]+", "_", line.what.lower()) if line.change else "")
    return Training(model=ablation.model, phases=ablation.recipes, change=line.change, folder_name=folder)


def transfers_of(tables: PaperTables) -> Iterator[tuple[str, Part]]:
    """Models that go to other data: as they are, then those of the ablations."""
    for transfer in tables.transfers:
        plain = [
            TransferRow(training=training_of(model), figures=tuple(figures))
            for model, figures in transfer.results.items()
        ]
        yield transfer.table, Transfers(table=transfer.table, target=transfer.to, rows=plain, about=transfer.about)
    shared: dict[
        tuple[str, str], Transfers
    ] = {}  # ablations of one table that go to the same data are rows of one grid
    for ablation in tables.ablations:
        for index, target in enumerate(ablation.then):
            empty = Transfers(table=ablation.table, target=target, rows=[])
            shared.setdefault((ablation.table, target.recipe), empty).rows.extend(
                TransferRow(training=training_of_line(ablation, line), figures=line.then[index], what=line.what)
                for line in ablation.lines
                if line.then
            )
    yield from ((part.table, part) for part in shared.values())


def measurements_of(tables: PaperTables) -> Iterator[tuple[str, Part]]:
    for measurement in tables.measurements:
        yield measurement.table, Measurements(measurement=measurement)
