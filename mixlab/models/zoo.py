"""Named models: rows of data in `configs/models`, read once, checked, and built."""

import copy
import fnmatch
import functools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import resources
from os import PathLike
from typing import Any, Literal, overload

from mixlab.core.choices import make
from mixlab.core.errors import ConfigError, near_misses
from mixlab.models.backbone import Backbone
from mixlab.models.build import build
from mixlab.models.config import ModelConfig, Reported, override
from mixlab.models.ensemble import Average, Ensemble
from mixlab.models.model import Model
from mixlab.models.released import fetch, find_release, is_released

FILE_KEYS = ("paper", "defaults", "groups", "models")
DETECTION = "detection"  # key of a row: the options that its paper changes where the model is a detector's backbone


@dataclass(frozen=True, kw_only=True)
class EnsembleRow:
    """A name that stands for several models at once."""

    name: str
    family: str
    paper: str = ""
    members: tuple[str, ...]
    average: Average = "logits"
    reported: tuple[Reported, ...] = ()


@functools.cache
def rows() -> dict[str, dict[str, Any]]:
    """Return every named model as plain data: its family's defaults, its group, then its own entries."""
    models: dict[str, dict[str, Any]] = {}
    for file in sorted((resources.files("mixlab") / "configs" / "models").iterdir(), key=lambda file: file.name):
        if not file.name.endswith(".toml"):
            continue
        data = tomllib.loads(file.read_text(encoding="utf-8"))
        family = file.name.removesuffix(".toml")
        for key in data:
            if key not in FILE_KEYS:
                raise ConfigError(f"Unknown key {key!r} in {file.name}. {near_misses(key, FILE_KEYS)}")
        for name, row in data["models"].items():
            entries = dict(row)
            group = data.get("groups", {})[entries.pop("group")] if "group" in entries else {}
            about = {"name": name, "family": family, "paper": data.get("paper", "")}
            models[name] = {**about, **data.get("defaults", {}), **group, **entries}
    return models


def list_models(pattern: str = "*") -> list[str]:
    """Return the names of the models that match a shell pattern, sorted."""
    return sorted(fnmatch.filter(rows(), pattern))


def ensemble_row(name: str) -> EnsembleRow | None:
    """Return the description of a named ensemble, or None for the name of a single model."""
    if not isinstance(name, str) or name not in rows():
        name = str(name)
        raise ConfigError(f"Unknown model {name!r}. {near_misses(name, rows())} `mixlab models` lists all.")
    return make(EnsembleRow, rows()[name], f"ensemble {name!r}") if "members" in rows()[name] else None


def model_config(name: str, **overrides: Any) -> ModelConfig:
    """Return the checked description of a named model, with any of its fields changed."""
    ensemble = ensemble_row(name)
    if ensemble is not None:
        raise ConfigError(f"{name!r} is an ensemble: its members {', '.join(ensemble.members)} have configs.")
    return configure({key: entry for key, entry in copy.deepcopy(rows()[name]).items() if key != DETECTION}, overrides)


def detection_options(name: str) -> dict[str, Any]:
    """Return the options of `create_model` with which a model's paper builds it as the backbone of a detector."""
    options: dict[str, Any] = copy.deepcopy(rows().get(name, {}).get(DETECTION, {}))
    return options


def configure(row: Mapping[str, Any], overrides: Mapping[str, Any]) -> ModelConfig:
    """Return the checked description that a row and changes of its fields give."""
    known = [field.name for field in fields(ModelConfig) if field.name not in ("name", "family", "paper")]
    for key in overrides:
        if key == "pretrained":
            raise ConfigError("There is no 'pretrained': give a weight file instead, create_model(NAME, weights=PATH).")
        if key not in known:
            raise ConfigError(f"Unknown model option {key!r}. {near_misses(key, known)}")
    return ModelConfig.parse(override(row, overrides))


@overload
def create_model(
    name: Literal["ensemble_hpx_conv_s18", "ensemble_hpx_conv_hb_ca_s18"],
    *,
    weights: str | PathLike[str] | None = None,
    class_map: Sequence[int] | None = None,
    **overrides: Any,
) -> Ensemble: ...


@overload
def create_model(
    name: str | None = None,
    *,
    weights: str | PathLike[str] | None = None,
    class_map: Sequence[int] | None = None,
    **overrides: Any,
) -> Backbone: ...


def create_model(
    name: str | None = None,
    *,
    weights: str | PathLike[str] | None = None,
    class_map: Sequence[int] | None = None,
    **overrides: Any,
) -> Model:
    """Create a model by its name, from a weight file, or by its name with weights.

    `overrides` change any field of the config: `num_classes`, `image_size`, `in_channels`, `mixers`, `drop_path`, ...
    Without a name, the file must be one that `save_weights` wrote: it holds the config. With `num_classes`, a
    classifier of another size in the file is left out and the model's stays fresh. `weights="released"` fetches the
    public checkpoint of the model, "released:TAG" another one of them (`mixlab.models.released`).
    `class_map` keeps rows of the file's larger classifier: see `load_weights`. The names of ensembles, and their files,
    give an `Ensemble`.
    """
    from mixlab.models import weights as files  # it needs `configure`

    replace_classifier = "num_classes" in overrides
    if is_released(weights):
        release = find_release("" if name is None or ensemble_row(name) else name, str(weights))
        overrides = {**release.overrides, **overrides}
        model_config(release.model, **overrides)  # wrong options are reported before the download
        weights = fetch(release)
    model: Backbone | Ensemble
    if name is None:
        if weights is None:
            raise ConfigError("create_model needs a model name, a weight file, or both. `mixlab models` lists names.")
        about = files.read_about(weights)
        members = [build(configure(config.plain(), overrides)) for config in about.configs]
        model = members[0] if about.ensemble is None else Ensemble(members, **about.ensemble)
    else:
        ensemble = ensemble_row(name)
        if ensemble is None:
            model = build(model_config(name, **overrides))
        else:
            members = [build(model_config(member, **overrides)) for member in ensemble.members]
            model = Ensemble(members, name=name, average=ensemble.average)
    if weights is not None:
        files.load_weights(model, weights, replace_classifier=replace_classifier, class_map=class_map)
        requested: dict[str, Any] = {key: overrides[key] for key in ("image_size", "preprocessing") if key in overrides}
        for member in model.backbones:  # the file brought its own
            member.config = configure(member.config.plain(), requested)
    return model
