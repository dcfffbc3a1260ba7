"""Bars of robustness: what each corruption, data set and attack leaves of every model, side by side."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mixlab.core.errors import ConfigError
from mixlab.findings.findings import Finding

SAME = ("data", "split", "images", "image_size", "crop", "seed", "severities", "severity_set", "prepared")
Values = dict[str, float]


@dataclass(frozen=True)
class Bar:
    series: int
    text: str
    share: float  # of the longest possible bar


@dataclass(frozen=True)
class Bars:
    """A row of bars per label, one bar per model."""

    title: str
    series: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Bar, ...]], ...]

    @property
    def said(self) -> str:
        return f"{self.title}, for {len(self.series)} models and {len(self.rows)} rows; the tables have the numbers."


def bars_of(findings: Sequence[Finding]) -> list[Bars]:
    """Two charts, of errors and of accuracies, for each set of findings that were measured alike."""
    alike: dict[str, dict[str, Mapping[str, Any]]] = {}
    for found in findings:
        models = found.data.get("models")
        if isinstance(models, Mapping):
            key = json.dumps([found.settings.get(name) for name in SAME])
            alike.setdefault(key, {}).update(models)
    charts = []
    for models in alike.values():
        try:
            told = {
                "Error under corruptions in %, mean over severities": {name: errors(models[name]) for name in models},
                "Accuracy in %": {name: accuracies(models[name]) for name in models},
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"The numbers of {', '.join(models)} are not what `mixlab robustness` writes ({error!r}). Run it again."
            ) from error
        charts += [bars(title, values) for title, values in told.items() if any(values.values())]
    return charts


def errors(row: Mapping[str, Any]) -> Values:
    found = {"clean": 100 - row["clean"]["top1"]} if row.get("clean") else {}
    corruptions: Mapping[str, Any] = row.get("corruptions") or {}
    found |= {
        name: 100 - statistics.fmean(score["top1"] for score in severities.values())
        for name, severities in corruptions.items()
    }
    return found if corruptions else {}


def accuracies(row: Mapping[str, Any]) -> Values:
    """Clean, on variants of the data, and under attack."""
    scores: dict[str, Mapping[str, Any]] = {
        f"ImageNet-{name}": score for name, score in (row.get("variants") or {}).items()
    }
    scores |= {"ImageNet-Real": row["real"]} if row.get("real") else {}
    attacks = [score for score in row.get("attacks") or () if score["epsilon"]]  # without a change it is clean again
    scores |= {f"{score['kind'].upper()} {score['epsilon']:g}/255": score for score in attacks}
    clean = {"clean": row["clean"]} if row.get("clean") and scores else {}
    return {name: score["top1"] for name, score in {**clean, **scores}.items()}


def bars(title: str, values: Mapping[str, Values]) -> Bars:
    series = tuple(values)
    labels = dict.fromkeys(label for row in values.values() for label in row)
    rows = tuple(
        (label, tuple(bar(index, values[name][label]) for index, name in enumerate(series) if label in values[name]))
        for label in labels
    )
    return Bars(title, series, rows)


def bar(series: int, value: float) -> Bar:
    return Bar(series, f"{value:.1f}", round(value / 100, 4))
