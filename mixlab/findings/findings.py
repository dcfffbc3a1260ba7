"""What an instrument found: one shape for every verb, so that every one can be printed, kept, drawn and put on a page.

A finding is a folder with `<kind>.json`, its table as `<kind>.csv`, and each picture as SVG and PNG.
"""

import csv
import io
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Self

from mixlab.core.choices import make, plain
from mixlab.core.errors import ConfigError, require
from mixlab.core.files import write_whole
from mixlab.findings.results import describe_machine, finite, read_mapping
from mixlab.findings.svg import need

Cell = str | int | float | bool | None
DPI = 144
FILE_KINDS = ("svg", "png")


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture beside the JSON file: `<name>.svg` and `<name>.png`."""

    name: str
    caption: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One run of one instrument. `table` is what people read; `data` is everything else, JSON-ready."""

    kind: str  # the verb: "robustness", "erf", "bench", ...
    title: str
    columns: tuple[str, ...]  # of the table, the first one names the row
    table: tuple[tuple[Cell, ...], ...]
    settings: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    pictures: tuple[Picture, ...] = ()
    command: str = ""
    machine: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        widths = {len(row) for row in self.table} - {len(self.columns)}
        require(not widths, f"rows of {len(self.columns)} cells in the table of {self.kind!r}; got {sorted(widths)}.")

    def plain(self) -> dict[str, Any]:
        return finite(plain(self))

    @classmethod
    def parse(cls, row: Mapping[str, Any]) -> Self:
        own = dict(row)
        free = {key: dict(own.pop(key, {})) for key in ("settings", "data", "machine")}
        table = tuple(tuple(cells) for cells in own.pop("table", ()))
        found: Self = make(cls, {**own, "table": []}, "the finding")
        for key, value in {**free, "table": table}.items():
            object.__setattr__(found, key, value)
        found.__post_init__()
        return found


def command_line() -> str:
    """What was typed to get here."""
    return shlex.join(["mixlab", *sys.argv[1:]])


def finding(kind: str, title: str, columns: Sequence[str], table: Sequence[Sequence[Cell]], **rest: Any) -> Finding:
    """A finding of this command on this machine."""
    rows = tuple(tuple(row) for row in table)
    about = {"command": command_line(), "machine": describe_machine()}
    return Finding(kind=kind, title=title, columns=tuple(columns), table=rows, **{**about, **rest})


def check_folder(folder: str | PathLike[str]) -> Path:
    """Before long work: the folder can be made and written into."""
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file; --out must be a folder.")
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"Cannot write into {path}: {error.strerror}.") from error
    return path


def write_finding(found: Finding, folder: str | PathLike[str], figures: Mapping[str, Any] | None = None) -> Path:
    """JSON, CSV and pictures. `figures` maps the names of `found.pictures` to matplotlib figures."""
    path, drawn = check_folder(folder), dict(figures or {})
    names = [picture.name for picture in found.pictures]
    require(sorted(drawn) == sorted(names), f"a figure for each picture {names}; got {sorted(drawn)}.")
    for name, figure in drawn.items():
        for kind in FILE_KINDS:
            write_figure(figure, path / f"{name}.{kind}")
    write_whole(path / f"{found.kind}.csv", csv_text(found))
    target = path / f"{found.kind}.json"
    write_whole(target, json.dumps(found.plain(), indent=1) + "\n")
    return target


def check_picture_file(file: str | PathLike[str]) -> Path:
    """Before long work: a picture can be written into this file."""
    path, kinds = Path(file), " or ".join(f".{kind}" for kind in FILE_KINDS)
    if path.suffix.lower().removeprefix(".") not in FILE_KINDS:
        raise ConfigError(f"The ending of the file says what kind of picture it is: {kinds}; got {str(file)!r}.")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give the name of a file that ends in {kinds}.")
    if not path.parent.is_dir():
        raise ConfigError(f"Cannot write {path}: the folder {path.parent} does not exist. Create it first.")
    return path


def write_figure(figure: Any, path: Path) -> None:
    """A matplotlib figure as the kind of file that the path's ending names."""
    kind, out = path.suffix.lower().removeprefix("."), io.BytesIO()
    figure.savefig(out, format=kind, dpi=DPI, metadata={"Date": None} if kind == "svg" else None)
    write_whole(path, out.getvalue())


def csv_text(found: Finding) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(found.columns)
    writer.writerows(["" if cell is None else cell for cell in row] for row in found.table)
    return out.getvalue()


def read_finding(path: str | PathLike[str]) -> Finding:
    return Finding.parse(read_mapping(path, "finding"))


def figure(width: float = 6.4, height: float = 4.0) -> Any:
    """An empty matplotlib figure on white, for files; nothing of the user's own settings matters."""
    return need("matplotlib.figure").Figure(figsize=(width, height), layout="constrained", facecolor="white")


def legend_below(drawn: Any, *entries: Any, side: str, **words: Any) -> None:
    """A legend of names as they are: a dollar sign in the path of a model is no formula."""
    legend = drawn.legend(*entries, loc=f"outside lower {side}", frameon=False, **words)
    for text in legend.get_texts():
        text.set_parse_math(False)


def show_cell(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return f"{cell:.4g}" if abs(cell) < 1000 else f"{cell:,.0f}"
    return str(cell)
