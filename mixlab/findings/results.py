"""What a comparison found, as data: JSON out, checked dataclasses in."""

import json
import math
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch

from mixlab.core.choices import make, plain
from mixlab.core.errors import ConfigError, require
from mixlab.core.files import write_whole
from mixlab.core.processor import processor_name
from mixlab.core.version import VERSION
from mixlab.engine.kernels import kernels


@dataclass(frozen=True)
class Point:
    """One epoch of one run; None for what was not measured."""

    epoch: int
    train_loss: float | None = None
    val_loss: float | None = None
    top1: float | None = None  # percent, on the images for validation


@dataclass(frozen=True, kw_only=True)
class ModelResult:
    """One model. No `top1` means that it could not be trained; None stands for a cost that was not measured."""

    name: str
    params: int  # trainable
    frozen: int = 0
    macs: int
    top1: tuple[float, ...] = ()  # percent, one per seed
    top5: tuple[float, ...] = ()
    curves: tuple[tuple[Point, ...], ...] = ()  # one per seed
    images_per_second: float | None = None
    latency_ms: float | None = None
    peak_mb: float | None = None
    train_seconds: float | None = None  # of one seed, on average
    train_flops: float | None = None  # of one seed: floating-point operations, evaluation not included

    def __post_init__(self) -> None:
        shares = (*self.top1, *self.top5)
        require(all(0 <= share <= 100 for share in shares), f"accuracies in percent for {self.name!r}; got {shares}.")

    @property
    def mean(self) -> float | None:
        """Top-1 over the seeds."""
        return mean(self.top1)

    @property
    def spread(self) -> float | None:
        """Standard deviation of top-1 over the seeds; None for a single one."""
        return spread(self.top1)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a model may cost; None is no limit. Parameters count with the frozen ones."""

    max_ms: float | None = None
    max_mb: float | None = None
    max_params: int | None = None
    max_macs: int | None = None

    def __post_init__(self) -> None:
        limits = (self.max_ms, self.max_mb, self.max_params, self.max_macs)
        require(all(limit is None or limit > 0 for limit in limits), f"limits above 0 in a budget; got {limits}.")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several models under the same recipe, data, epochs and seeds."""

    title: str
    data: str
    recipe: str
    image_size: tuple[int, ...]
    epochs: int
    seeds: tuple[int, ...]
    models: tuple[ModelResult, ...]
    test_images: int | None = None
    budget: Budget = Budget()
    command: str = ""  # what repeats it
    settings: dict[str, str] = field(default_factory=dict)  # the recipe's values
    machine: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        require(bool(names), "at least one model in a comparison.")
        require(len(set(names)) == len(names), f"every model once in a comparison; got {names}.")
        require(len(self.image_size) == 2, f"an image_size of height and width; got {self.image_size}.")

    def ranked(self) -> list[ModelResult]:
        """Most accurate first; those without an accuracy last."""
        return sorted(self.models, key=lambda model: -math.inf if model.mean is None else model.mean, reverse=True)

    def plain(self) -> dict[str, Any]:
        """JSON-ready data that `parse` turns back into this comparison. A loss that is not finite becomes None."""
        return finite(plain(self))

    @classmethod
    def parse(cls, row: Mapping[str, Any]) -> Self:
        row = dict(row)
        texts = [strings(row.pop(key, {}), key) for key in ("settings", "machine")]
        comparison: Self = make(cls, row, "the comparison")
        return replace(comparison, settings=texts[0], machine=texts[1])


def mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def spread(values: Sequence[float]) -> float | None:
    """Sample standard deviation."""
    return statistics.stdev(values) if len(values) > 1 else None


def strings(value: Any, key: str) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(part, str) for part in (*value, *value.values())):
        raise ConfigError(f"{key!r} of the comparison must map strings to strings; got {value!r}.")
    return dict(value)


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_comparison(comparison: Comparison, path: str | PathLike[str]) -> None:
    write_whole(path, json.dumps(comparison.plain(), indent=1) + "\n")


def read_comparison(path: str | PathLike[str]) -> Comparison:
    return Comparison.parse(read_mapping(path, "comparison"))


def read_mapping(path: str | PathLike[str], what: str) -> Mapping[str, Any]:
    """What a JSON file holds; anything but a mapping is an error that calls the file `what`."""
    try:
        row = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The {what} {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a {what} in JSON: {error}") from error
    if not isinstance(row, Mapping):
        raise ConfigError(f"{path} is not a {what}: it holds a {type(row).__name__}, not a mapping.")
    return row


def describe_machine() -> dict[str, str]:
    """What timings depend on."""
    return {
        "processor": processor_name(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "system": f"{platform.system()} {platform.machine()}",
        "Python": platform.python_version(),
        "PyTorch": str(torch.__version__),
        "Mixlab": VERSION,
        "kernels": "none" if (found := kernels()) is None else f"vectors of {found.lanes}",
    }
