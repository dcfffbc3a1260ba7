"""Read and write weights: every known layout in, safetensors out. Nothing in a file is ever executed."""

import argparse
import json
import os
import pickle
import re
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from mixlab.core.errors import ConfigError, WeightsError
from mixlab.core.files import current_umask
from mixlab.models.backbone import Backbone
from mixlab.models.class_map import map_classifier
from mixlab.models.config import ModelConfig
from mixlab.models.dense_model import DenseModel, Trainable
from mixlab.models.ensemble import Ensemble
from mixlab.models.fitting import CLASSIFIER, FREE_FIELDS, absent_as_zeros, differences, fit, keep_own_classifier
from mixlab.models.layouts import best_layout
from mixlab.models.model import Model

METADATA_KEY = "mixlab"
WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")  # around the tensors in training checkpoints


@dataclass(frozen=True)
class WeightsHeader:
    """What a Mixlab file says besides its tensors: one config, or those of an ensemble's members and its settings."""

    configs: tuple[ModelConfig, ...] = ()
    ensemble: dict[str, Any] | None = None
    class_names: tuple[str, ...] = ()
    task: dict[str, Any] | None = None  # of a model on a backbone: the task's name and that model's config


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by key, and what a Mixlab file says about them."""

    origin: str
    tensors: Mapping[str, Any]
    about: WeightsHeader = WeightsHeader()

    @property
    def config(self) -> ModelConfig | None:
        return self.about.configs[0] if self.about.configs else None


# -- out -----------------------------------------------------------------------------------------


def save_weights(model: nn.Module, path: str | PathLike[str]) -> None:
    """Write the tensors with config, class names and preprocessing; `create_model(weights=path)` rebuilds the model.

    A segmenter or detector is rebuilt by `load_dense(path)`. The file is safetensors, whatever its name, and appears
    under that name only when it is complete.
    """
    backbone, target = unwrapped(model), Path(path)
    if not target.parent.is_dir():
        raise WeightsError(f"Cannot write {target}: the folder {target.parent} does not exist. Create it first.")
    if target.is_dir():
        raise WeightsError(f"Cannot write {target}: it is a folder. Give a file name ending in .safetensors.")
    tensors = {key: value.detach().contiguous() for key, value in backbone.state_dict().items()}
    if any(value.is_meta for value in tensors.values()):
        raise WeightsError("The model has no values to save: it is on the meta device.")
    about: dict[str, Any] = {"class_names": check_class_names(backbone)}
    if isinstance(backbone, DenseModel):
        about["config"] = backbone.backbone.config.plain()
        about["task"] = {"name": backbone.task, "config": backbone.config.plain()}
    elif isinstance(backbone, Ensemble):
        about["ensemble"] = {"name": backbone.config.name, "average": backbone.average}
        about["members"] = [member.config.plain() for member in backbone.members]
    else:
        about["config"] = backbone.config.plain()
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        os.close(handle)
        safetensors.torch.save_file(tensors, temporary, {"format": "pt", METADATA_KEY: json.dumps(about)})
        os.chmod(temporary, 0o666 & ~current_umask())
        os.replace(temporary, target)
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        raise WeightsError(f"Cannot write {target}: {first_line(error)}") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def check_class_names(model: Trainable) -> list[str]:
    """Return the names of the model's classes; raise unless there is one per class, or none at all."""
    names = model.class_names
    classes = model.config.num_classes
    right = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
    if not right or len(names) not in (0, classes):
        raise WeightsError(f"class_names must be {classes} strings, one per class, or empty; got {names!r}.")
    return list(names)


def unwrap_model(model: nn.Module) -> Model:
    """Return the model inside the wrappers of DistributedDataParallel and torch.compile."""
    inner = unwrapped(model)
    if isinstance(inner, DenseModel):
        raise WeightsError(f"A {inner.task} model is filled through its `backbone`, or rebuilt by `load_dense`.")
    return inner


def unwrapped(model: nn.Module) -> Trainable:
    """Return the backbone, ensemble, segmenter or detector inside any wrappers."""
    inner = model
    while not isinstance(inner, (Model, DenseModel)):
        wrapped = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
        if not isinstance(wrapped, nn.Module):
            raise WeightsError(f"Expected a Mixlab model; got a {type(model).__name__}.")
        inner = wrapped
    return inner


# -- in ------------------------------------------------------------------------------------------


def load_weights(
    model: nn.Module,
    source: str | PathLike[str] | Mapping[str, Tensor],
    *,
    replace_classifier: bool = False,
    class_map: Sequence[int] | None = None,
) -> None:
    """Fill a model from a file (.safetensors, .pth) or a mapping, in Mixlab's, the authors' or timm's layout.

    Strict: every parameter must be there and fit, or nothing is changed. What depends on the image size is
    resized. `replace_classifier` leaves out a classifier of another size; the model keeps its own. `class_map` has, for
    each class of the model, its row in the classifier of the source, or -1 for the mean of all rows.
    """
    backbone = unwrap_model(model)
    if class_map is not None and isinstance(backbone, Ensemble):
        raise ConfigError("A class map is for a single model: load the members one by one.")
    checkpoint = Checkpoint("The mapping", source) if isinstance(source, Mapping) else read(source)
    if checkpoint.about.task is not None:
        what = f"a model for {checkpoint.about.task['name']}; take the backbone of load_dense({str(source)!r})"
        raise WeightsError(f"{checkpoint.origin} holds {what}.")
    if isinstance(backbone, Ensemble):
        parts = members_of(backbone, checkpoint)
    else:
        parts = [(single, checkpoint) for single in backbone.backbones]
    fitted = [
        fitting(member, part, replace_classifier=replace_classifier, class_map=class_map) for member, part in parts
    ]
    for (member, part), (tensors, current) in zip(parts, fitted, strict=True):
        loaded_classifier = not any(tensors[key] is current[key] for key in current if key.startswith(CLASSIFIER))
        member.load_state_dict(tensors, assign=any(value.is_meta for value in current.values()))
        adopt(member, part, loaded_classifier=loaded_classifier and class_map is None)


def members_of(model: Ensemble, checkpoint: Checkpoint) -> list[tuple[Backbone, Checkpoint]]:
    """Pair each member of an ensemble with its share of a checkpoint."""
    matches = {key: re.search(r"(?:^|\.)members\.(\d+)\.(.+)$", key) for key in checkpoint.tensors}
    count = len({match[1] for match in matches.values() if match})
    configs = checkpoint.about.configs or (None,) * len(model.members)
    if not all(matches.values()) or count != len(model.members) or len(configs) != count:
        raise WeightsError(
            f"{checkpoint.origin} holds {count} members; {model.config.name!r} has {len(model.members)}. Weights of a "
            f"single model go into a member: load_weights(model.members[0], ...)."
        )
    parts = []
    for index, (member, config) in enumerate(zip(model.members, configs, strict=True)):
        keys = {match[2]: key for key, match in matches.items() if match and int(match[1]) == index}
        share = {name: checkpoint.tensors[key] for name, key in keys.items()}
        about = replace(checkpoint.about, configs=() if config is None else (config,), ensemble=None)
        parts.append((member, Checkpoint(f"{checkpoint.origin}, member {index},", share, about)))
    return parts


def read_about(path: str | PathLike[str]) -> WeightsHeader:
    """Return what a file that `save_weights` wrote says about its model."""
    about = read(path, tensors=False).about
    if about.task is not None:
        raise WeightsError(
            f"{path} holds a model for {about.task.get('name')}, not a classifier: use load_dense(path)."
        )
    if not about.configs:
        raise WeightsError(
            f"{path} holds no Mixlab config, so the model cannot be rebuilt from it alone. "
            f"Name the model: create_model(NAME, weights=...)."
        )
    return about


def read(path: str | PathLike[str], *, tensors: bool = True) -> Checkpoint:
    """Read the tensors of a file, onto the CPU, and what the file says about them."""
    if not isinstance(path, (str, PathLike)):
        raise WeightsError(f"Weights come from a file or a mapping of tensors; got a {type(path).__name__}.")
    file = Path(path)
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise WeightsError(f"The weight file {file} {what}.")
    try:
        with file.open("rb") as opened:
            start = opened.read(9)
        if start[8:9] == b"{" or file.suffix == ".safetensors":
            return read_safetensors(file, tensors=tensors)
        if start[:1] != b"\x80" and start[:2] != b"PK":
            raise WeightsError(f"{file} is not a weight file: it is neither safetensors nor a PyTorch checkpoint.")
        return read_torch(file)
    except pickle.UnpicklingError as error:
        raise WeightsError(
            f"{file} is broken or holds more than plain tensors, and Mixlab does not execute what is in a file. "
            f"Save only the tensors: torch.save(model.state_dict(), ...) or safetensors."
        ) from error
    except (safetensors.SafetensorError, RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(f"{file} cannot be read as weights; it may be truncated: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def read_safetensors(file: Path, *, tensors: bool) -> Checkpoint:
    with safetensors.safe_open(file, "pt") as opened:
        about = json.loads((opened.metadata() or {}).get(METADATA_KEY, "{}"))
        values = {key: opened.get_tensor(key) for key in opened.keys()} if tensors else {}  # noqa: SIM118
    about = about if isinstance(about, dict) else {}
    configs, names = about.get("members", [about["config"]] if "config" in about else []), about.get("class_names", [])
    if not isinstance(configs, list) or not all(isinstance(config, dict) for config in configs):
        raise ValueError("its description of the model is not a mapping.")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("its class names are not a list of strings.")
    task = about.get("task")
    if task is not None and not (isinstance(task, dict) and isinstance(task.get("config"), dict) and "name" in task):
        raise ValueError("its description of the task is not a mapping with a name and a config.")
    try:
        parsed = tuple(ModelConfig.parse(config) for config in configs)
    except ConfigError as error:
        raise WeightsError(f"{file} describes a model that this version cannot build: {error}") from error
    return Checkpoint(str(file), values, WeightsHeader(parsed, about.get("ensemble"), tuple(names), about.get("task")))


def read_torch(file: Path) -> Checkpoint:
    # timm's training checkpoints carry their arguments in a Namespace, which holds data only
    with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about pickle protocols of foreign files
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(loaded, Mapping):
        raise ValueError(f"it holds a {type(loaded).__name__}, not a mapping of tensors.")
    return Checkpoint(str(file), loaded)


def unwrap(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the tensors without what training scripts add: a mapping around them, a prefix to every name."""
    tensors = checkpoint.tensors
    for wrapper in WRAPPERS:
        if isinstance(tensors.get(wrapper), Mapping):
            tensors = tensors[wrapper]
    for key, value in tensors.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            what = f"{key!r} is a {type(value).__name__}, not a tensor"
            raise WeightsError(f"{checkpoint.origin} is not a mapping of names to tensors: {what}.")
        if value.is_meta or value.layout is not torch.strided or not value.is_floating_point():
            what = "without values" if value.is_meta else f"{value.dtype} in layout {value.layout}"
            raise WeightsError(f"{checkpoint.origin}: {key!r} must be a dense tensor of real numbers; it is {what}.")
    if not tensors:
        raise WeightsError(f"{checkpoint.origin} holds no tensors: it is empty.")
    return without_prefix(dict(tensors))


def without_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the words that all names start with, such as those of DDP, torch.compile and Lightning."""
    while len(tensors) > 1:
        first = {key.partition(".")[0] for key in tensors}
        if len(first) > 1:
            break
        tensors = {key.partition(".")[2]: value for key, value in tensors.items()}
    return tensors


def fitting(
    model: Backbone, checkpoint: Checkpoint, *, replace_classifier: bool, class_map: Sequence[int] | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of a checkpoint as they fill this model, and the model's; an error says what is wrong."""
    current: dict[str, Tensor] = model.state_dict()
    tensors = best_layout(checkpoint.origin, unwrap(checkpoint), current)
    tensors = absent_as_zeros(model, current) | fit(model, tensors, checkpoint.config)
    if class_map is not None:
        tensors = map_classifier(tensors, class_map, checkpoint.origin, model.config.num_classes)
    if replace_classifier:
        tensors = keep_own_classifier(tensors, current)
    problems = differences(tensors, current)
    if problems:
        raise WeightsError(f"{checkpoint.origin} does not fit {model.config.name!r}: {problems}")
    return tensors, current


def adopt(model: Backbone, checkpoint: Checkpoint, *, loaded_classifier: bool) -> None:
    """Take over what a Mixlab file says besides its tensors: preprocessing and class names."""
    source = checkpoint.config
    if source is None:
        return
    if source.in_channels == model.config.in_channels:
        model.config = replace(model.config, preprocessing=source.preprocessing)
    if loaded_classifier and len(checkpoint.about.class_names) == model.config.num_classes:
        model.class_names = checkpoint.about.class_names
    names = [field.name for field in fields(model.config) if field.name not in FREE_FIELDS]
    different = [name for name in names if getattr(source, name) != getattr(model.config, name)]
    if different:
        warnings.warn(
            f"{checkpoint.origin} was saved from a model with other {', '.join(different)}; its weights fit, but "
            f"they were trained to compute something else.",
            stacklevel=3,
        )
