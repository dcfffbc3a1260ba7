"""What is known of the papers' tables beside the rows of named models: `tables.toml` and a file per paper."""

import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mixlab.core.choices import make
from mixlab.models.papers import papers

TITLE = re.compile(r"(Table|Figure)(s?) (.+)")
SPAN = re.compile(r"(\d+)(?: to (\d+))?")


@dataclass(frozen=True, kw_only=True)
class Target:
    """Other data that trained weights go to, by a recipe, and what a paper reports of it.

    `measures` are read off the training, `evaluated` off a `mixlab eval` with the flags `evaluate`. `set` changes the
    recipe, `change` the models whose names begin with its keys.
    """

    data: str
    recipe: str
    measures: tuple[str, ...] = ()
    evaluate: str = ""
    evaluated: tuple[str, ...] = ()
    set: str = ""
    change: dict[str, Any] = field(default_factory=dict)

    def change_of(self, model: str) -> str:
        return "; ".join(change for beginning, change in self.change.items() if model.startswith(beginning))


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of an ablation: what is changed, as text and for --model-set, and the figures.

    `then` has the figures on other data. A line that changes nothing shares the folder of its model's runs, unless it
    names a `folder` of its own.
    """

    what: str
    change: str = ""
    folder: str = ""
    top1: float
    macs: float | None = None  # billions
    then: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """Lines of a table that change one model; its recipes are phases of one training."""

    table: str
    model: str
    recipes: tuple[str, ...]
    lines: tuple[Line, ...]
    then: tuple[Target, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A table of models that go from their ImageNet weights to other data; "timm:NAME" is one of timm's backbones."""

    table: str
    about: str = ""
    to: Target
    results: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A table or figure that is measured on models as they are, by commands with places for models and weights."""

    table: str
    about: str = ""
    columns: tuple[str, ...] = ()
    results: dict[str, Any] = field(default_factory=dict)
    commands: tuple[str, ...]
    image_size: int = 224
    pretraining: str | None = None


@dataclass(frozen=True, kw_only=True)
class PaperTables:
    """How many tables and figures a paper has, why some are left out, and the rows that are not models of their own."""

    tables: int
    figures: int
    evaluate: str = ""  # flags of `mixlab eval` that the paper's accuracies need
    left_out: dict[str, str] = field(default_factory=dict)
    ablations: tuple[Ablation, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    measurements: tuple[Measurement, ...] = ()


# -- reading -------------------------------------------------------------------------------------


def read(*path: str) -> dict[str, Any]:
    file = Path(__file__).parent.joinpath(*path)
    return tomllib.loads(file.read_text(encoding="utf-8"))


@functools.cache
def shared() -> dict[str, Any]:
    return read("tables.toml")


@functools.cache
def paper_tables() -> Mapping[str, PaperTables]:
    """By paper, in the order of the papers."""
    rows = {paper: {**shared()["papers"][paper], **read("tables", f"{paper}.toml")} for paper in papers()}
    return {paper: make(PaperTables, row, f"the tables of {paper}") for paper, row in rows.items()}


def numbers_of(title: str) -> tuple[str, set[int]]:
    """What a title counts and its numbers: "Figures 7 to 9 and 11" are ("Figure", {7, 8, 9, 11})."""
    match = TITLE.fullmatch(title)
    if match is None:
        raise ValueError(f"not the title of a table or figure: {title!r}")
    kind, plural, rest = match.groups()
    spans = SPAN.findall(rest) if plural else SPAN.findall(rest)[:1]
    return kind, {number for first, last in spans for number in range(int(first), int(last or first) + 1)}
