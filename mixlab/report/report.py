"""What goes onto a report: comparisons, training runs and findings, read from the paths that a user names."""

import base64
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mixlab.core.errors import ConfigError, MixlabError
from mixlab.evals.cost.run_compute import flops_of_run
from mixlab.evals.cost.summary import count, shadow
from mixlab.findings.findings import Finding, Picture, read_finding
from mixlab.findings.results import Comparison, read_comparison
from mixlab.metrics.macs import macs_by_part
from mixlab.models.weights import read_about
from mixlab.training.run import read_config

if TYPE_CHECKING:
    from mixlab.training.run import RunConfig

Metrics = Mapping[str, float | None]
CONFIG, RESULT, METRICS, WEIGHTS = "config.json", "result.json", "metrics.json", "final.safetensors"
WANTED = (
    "a folder of `mixlab compare`, a run folder of `mixlab train`, what another verb wrote with --out, "
    "or a folder with some of these in it"
)
SKIPPED = {"tensorboard", "__pycache__", "node_modules"}
LARGE = 600_000  # bytes; of a drawing above it, the pixels are taken where they are fewer
MEDIA = {"svg": "image/svg+xml", "png": "image/png"}


@dataclass(frozen=True)
class Compared:
    source: str  # its JSON file
    comparison: Comparison


@dataclass(frozen=True)
class TrainedRun:
    """A run of `mixlab train`. Without an end it has no `test` and no costs."""

    source: str  # the folder
    config: "RunConfig"
    history: tuple[Metrics, ...]  # one row per evaluation
    test: Metrics | None
    finished: bool
    params: int | None = None
    macs: int | None = None
    train_flops: float | None = None  # of this run alone: what its first weights cost is not in it

    @property
    def task(self) -> str:
        return str(self.config.recipe.get("task", "classification"))


@dataclass(frozen=True)
class Drawing:
    """A picture as it goes into a page; no `uri` where its file is not beside the finding."""

    name: str
    caption: str
    uri: str | None


@dataclass(frozen=True)
class Instrument:
    """A finding with its pictures."""

    source: str  # its JSON file
    finding: Finding
    drawings: tuple[Drawing, ...]


@dataclass(frozen=True)
class Report:
    """What was read, in the order in which it was given."""

    title: str
    comparisons: tuple[Compared, ...] = ()
    runs: tuple[TrainedRun, ...] = ()
    instruments: tuple[Instrument, ...] = ()

    @property
    def lost(self) -> list[str]:
        """Pictures that findings speak of and that are not there."""
        return [
            str(Path(instrument.source).parent / drawing.name)
            for instrument in self.instruments
            for drawing in instrument.drawings
            if drawing.uri is None
        ]


def collect(paths: Sequence[str | PathLike[str]], *, title: str = "Mixlab report") -> Report:
    """Everything that the paths hold. Whatever is missing or broken is named in one error, all of it at once."""
    problems: list[str] = []
    files: dict[Path, tuple[str, Path]] = {}
    for path in paths:
        try:
            found = list(recognized(Path(path)))
            files |= {file.resolve(): (kind, file) for kind, file in found if file.resolve() not in files}
        except MixlabError as error:
            problems.append(str(error))
    items: list[Any] = []
    for kind, file in files.values():
        try:
            items.append(READERS[kind](file))
        except MixlabError as error:
            told = str(error)
            problems.append(told if str(file) in told or str(file.parent) in told else f"{file}: {told}")
    if not paths:
        problems.append(f"Nothing was named. Give {WANTED}.")
    if problems:
        advice = "\nMend them, run their commands again, or leave them out." if paths else ""
        raise ConfigError("\n".join(problems) + advice)
    comparisons = tuple(item for item in items if isinstance(item, Compared))
    runs = tuple(item for item in items if isinstance(item, TrainedRun))
    return Report(title, comparisons, runs, tuple(item for item in items if isinstance(item, Instrument)))


# -- which files -----------------------------------------------------------------------------------


def recognized(path: Path) -> Iterator[tuple[str, Path]]:
    """The files below a path that a report can read, each with its kind. Runs of a comparison are part of it."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist. Expected {WANTED}.")
    if path.is_file():
        path = path.parent / CONFIG if path.name in (RESULT, METRICS, WEIGHTS) else path
        kind = kind_of(path)
        if kind is None:
            raise ConfigError(f"{path} is nothing that a report can show. Expected {WANTED}.")
        yield kind, path
        return
    found, compared = [], set[Path]()
    for name, folders, files in os.walk(path):
        folder = Path(name)
        folders[:] = sorted(one for one in folders if not one.startswith(".") and one not in SKIPPED)
        known = [(kind_of(folder / file), folder / file) for file in sorted(files) if file.endswith(".json")]
        if any(kind == "comparison" for kind, _ in known):
            compared.add(folder)
        inside = any(parent in compared for parent in folder.parents)
        found += [(kind, file) for kind, file in known if kind and not (kind == "run" and inside)]
    if not found:
        raise ConfigError(f"{path} holds nothing that a report can show. Expected {WANTED}.")
    yield from found


def kind_of(file: Path) -> str | None:
    """By what is in it, so that renamed files and the JSON files of others do no harm."""
    if file.name in (RESULT, METRICS):  # the run's config speaks for them
        return None
    row = read_json(file)
    keys = set(row) if isinstance(row, dict) else set()
    if {"models", "seeds", "recipe"} <= keys:
        return "comparison"
    if {"kind", "columns", "table"} <= keys:
        return "finding"
    return "run" if {"model", "data", "recipe"} <= keys else None


def read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not whole JSON: {error}.") from error


# -- comparisons, runs, findings -------------------------------------------------------------------


def read_compared(file: Path) -> Compared:
    return Compared(str(file), read_comparison(file))


def read_run(file: Path) -> TrainedRun:
    folder, config = file.parent, read_config(file)
    result: dict[str, Any] = {}
    if (folder / RESULT).exists():
        result = mapping(read_json(folder / RESULT), folder / RESULT)
    history = result.get("history") if result else None
    if history is None:
        history = read_json(folder / METRICS) if (folder / METRICS).exists() else []
    if not isinstance(history, list) or not all(isinstance(row, dict) and "epoch" in row for row in history):
        raise ConfigError(f"The metrics of {folder} are not a list with a row per epoch.")
    known: dict[str, Any] = {}
    if config.recipe.get("task", "classification") == "classification" and (folder / WEIGHTS).exists():
        known = costs(folder / WEIGHTS, config, result.get("train_images"))
    return TrainedRun(str(folder), config, tuple(history), result.get("test"), bool(result), **known)


def mapping(row: Any, file: Path) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ConfigError(f"{file} holds a {type(row).__name__}, not the mapping that `mixlab train` writes.")
    return row


def costs(weights: Path, run: "RunConfig", images: int | None) -> dict[str, float | None]:
    """Parameters and MACs of trained weights at their own image size, and the arithmetic of their training."""
    params = macs = 0
    configs = read_about(weights).configs
    for config in configs:
        model, (height, width) = shadow(config), config.image_size
        params += count(model, trainable=True) + count(model, trainable=False)
        macs += sum(macs_by_part(model, (height, width)).values())
    return {"params": params, "macs": macs, "train_flops": flops_of_run(run, configs, images)}


def read_instrument(file: Path) -> Instrument:
    try:
        found = read_finding(file)
    except MixlabError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{file} is not a finding as Mixlab writes it: {error}.") from error
    odd = [cell for row in found.table for cell in row if not isinstance(cell, str | int | float | None)]
    if odd:
        raise ConfigError(f"{file} has a table with a cell that is neither text nor number: {odd[0]!r}.")
    return Instrument(str(file), found, tuple(embed(picture, file.parent) for picture in found.pictures))


def embed(picture: Picture, folder: Path) -> Drawing:
    """A picture inside the page. As an image, a drawing can neither run scripts nor load anything."""
    if Path(picture.name).name != picture.name:
        raise ConfigError(f"The picture {picture.name!r} is not the plain name of a file beside the finding.")
    files = {kind: folder / f"{picture.name}.{kind}" for kind in MEDIA}
    there = {kind: file.read_bytes() for kind, file in files.items() if file.is_file()}
    if not there:
        return Drawing(picture.name, picture.caption, None)
    kind = next(iter(there))
    if len(there[kind]) > LARGE:
        kind = min(there, key=lambda one: len(there[one]))
    return Drawing(picture.name, picture.caption, f"data:{MEDIA[kind]};base64,{base64.b64encode(there[kind]).decode()}")


READERS: dict[str, Callable[[Path], Any]] = {
    "comparison": read_compared,
    "run": read_run,
    "finding": read_instrument,
}
