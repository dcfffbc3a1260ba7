"""The parts that a table's section is made of, each as lines of Markdown: a grid of figures, then commands."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mixlab.models.config import Reported
from mixlab.models.zoo import ensemble_row
from tools.reproduce import costs
from tools.reproduce.markdown import block, earlier, grid, number
from tools.reproduce.tables import Measurement, Target
from tools.reproduce.trainings import (
    Printed,
    Training,
    measurement_command,
    training_commands,
    training_of,
    transfer_commands,
    transfer_folder,
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table of accuracies: a model, what is changed in it, what the paper reports."""

    model: str
    reported: Reported
    training: Training
    what: str = ""

    @property
    def name(self) -> str:
        return f"`{self.model}`" + (f": {self.what}" if self.what else "")


@dataclass(frozen=True, kw_only=True)
class Accuracies:
    """Models that are trained on ImageNet. `evaluate` are flags of `mixlab eval` that the figures need."""

    table: str
    rows: Sequence[Row]
    evaluate: str = ""

    def lines(self, printed: Printed) -> list[str]:
        titles = ("model", "px", "top-1 in the paper", "recipes", "GMACs, paper", "counted", "GPU hours", "all")
        commands = [
            command
            for row in self.rows
            for command in training_commands(
                row.training, printed, self.table, figure=f"{row.reported.top1}", evaluate=self.evaluate
            )
        ]
        runs = [row.training.folder(-1) if row.training.phases else row.training.subject for row in self.rows]
        return [*grid(titles, map(accuracy_cells, self.rows)), *block(commands), *earlier(runs, self.table, printed)]


def accuracy_cells(row: Row) -> list[str]:
    reported, training = row.reported, row.training
    cells = [row.name, str(reported.image_size), f"{reported.top1}"]
    if not training.phases:
        return [*cells, "public weights", number(reported.macs), counted(row), "", ""]
    spent = costs.training_costs(training)
    recipes = ", then ".join(f"`{recipe}`" for recipe in training.phases)
    figures = (reported.macs, spent.gmacs, spent.hours[-1], sum(spent.hours))
    return [*cells, recipes, *map(number, figures)]


def counted(row: Row) -> str:
    return number(costs.gmacs(row.model, row.reported.image_size))


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Models of which a table says only what they cost."""

    rows: Sequence[Row]

    def lines(self, printed: Printed) -> list[str]:
        cells = [[row.name, str(row.reported.image_size), number(row.reported.macs), counted(row)] for row in self.rows]
        commands = [f"mixlab info {row.model} --image-size {row.reported.image_size}" for row in self.rows]
        return [*grid(("model", "px", "GMACs, paper", "counted"), cells), *block(commands, "many")]


@dataclass(frozen=True, kw_only=True)
class Ensembles:
    """Ensembles, whose members are trained elsewhere."""

    rows: Sequence[Row]

    def lines(self, printed: Printed) -> list[str]:
        cells, commands = [], []
        for row in self.rows:
            ensemble = ensemble_row(row.model)
            assert ensemble is not None
            weights = [training_of(member).weights for member in ensemble.members]
            members = ", ".join(f"`{member}`" for member in ensemble.members)
            cells.append([f"`{row.model}`", members, f"{row.reported.top1}"])
            commands.append(
                f"mixlab disagree {' '.join(weights)} imagenet --average {ensemble.average}  # {row.reported.top1}"
            )
        return [
            "Ensembles take no training of their own: `mixlab disagree` also prints the top-1 of its models' mean.",
            *("", *grid(("ensemble", "members", "top-1 in the paper"), cells), *block(commands)),
        ]


@dataclass(frozen=True, kw_only=True)
class TransferRow:
    """A trained model that goes to other data, and the paper's figures there."""

    training: Training
    figures: tuple[float, ...]
    what: str = ""

    @property
    def name(self) -> str:
        return f"`{self.training.model}`" + (f": {self.what}" if self.what else "")


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Models that go from their ImageNet weights to other data."""

    table: str
    target: Target
    rows: list[TransferRow]
    about: str = ""

    def lines(self, printed: Printed) -> list[str]:
        titles = ("model", *self.target.measures, *self.target.evaluated, "recipe", "GPU hours")
        cells, commands = [], list[str]()
        for row in self.rows:
            figures = [f"{figure}" for figure in row.figures]
            hours = number(costs.transfer_hours(row.training, self.target))
            cells.append([row.name, *figures, f"`{self.target.recipe}`", hours])
            commands += transfer_commands(row.training, self.target, printed, self.table, figures)
        runs = [transfer_folder(row.training, self.target) for row in self.rows]
        return [
            *introduced(self.about),
            *grid(titles, cells),
            *block(commands),
            *earlier(runs, self.table, printed),
        ]


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """A table or figure that is measured on models as they are."""

    measurement: Measurement

    def lines(self, printed: Printed) -> list[str]:
        asked = self.measurement
        names = list(asked.results)
        cells = [[f"`{name}`", *map(str, figures)] for name, figures in asked.results.items()]
        commands = [
            measurement_command(template, names, asked.image_size, asked.pretraining) for template in asked.commands
        ]
        table = grid(("", *asked.columns), cells)
        return [*introduced(asked.about), *table, *block(commands, "data of your own, or a GPU")]


def introduced(about: str) -> Iterable[str]:
    return [about, ""] if about else []
