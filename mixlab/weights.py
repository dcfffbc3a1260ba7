"""Weights in and out: every known layout in, safetensors out. Nothing in a file is ever executed."""

import argparse
import functools
import json
import os
import pickle
import re
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from mixlab.backbone import Backbone
from mixlab.config import ModelConfig
from mixlab.errors import WeightsError
from mixlab.grid import Grid

METADATA_KEY = "mixlab"
CLASSIFIER = "head.classifier."
WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")  # around the tensors in training checkpoints
PREFIXES = ("module.", "_orig_mod.")  # DistributedDataParallel, torch.compile
LISTED = 10  # how many keys of a kind an error names


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by key, and what a file of ours says about them."""

    origin: str
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any] | None = None
    class_names: tuple[str, ...] = ()


# -- out -----------------------------------------------------------------------------------------


def save_weights(model: Backbone, path: str | PathLike[str]) -> None:
    """Write the tensors with config, class names and preprocessing; `create_model(weights=path)` rebuilds the model.

    The file appears under its name only when it is complete.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise WeightsError(f"Cannot write {target}: the folder {target.parent} does not exist. Create it first.")
    if target.is_dir():
        raise WeightsError(f"Cannot write {target}: it is a folder. Give a file name ending in .safetensors.")
    about = {"config": model.config.plain(), "class_names": list(model.class_names)}
    metadata = {"format": "pt", METADATA_KEY: json.dumps(about)}
    tensors = {key: value.detach().contiguous() for key, value in model.state_dict().items()}
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    try:
        safetensors.torch.save_file(tensors, temporary, metadata)
        os.chmod(temporary, 0o666 & ~current_umask())
        os.replace(temporary, target)
    except (OSError, safetensors.SafetensorError) as error:
        raise WeightsError(f"Cannot write {target}: {error}.") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def current_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


# -- in ------------------------------------------------------------------------------------------


def load_weights(
    model: Backbone, source: str | PathLike[str] | Mapping[str, Tensor], *, replace_classifier: bool = False
) -> None:
    """Fill a model from a file (.safetensors, .pth) or a mapping, in our own, the authors' or timm's layout.

    Strict: every parameter must be there and fit, or nothing is changed. What depends on the image size is
    resized. `replace_classifier` leaves out a classifier of another size; the model keeps its own.
    """
    checkpoint = Checkpoint("the mapping", source) if isinstance(source, Mapping) else read(source)
    own = model.state_dict()
    tensors = best_layout(unwrap(checkpoint), own)
    tensors = fit(model, tensors, checkpoint.config)
    if replace_classifier:
        tensors = keep_own_classifier(tensors, own)
    problems = differences(tensors, own)
    if problems:
        raise WeightsError(f"{checkpoint.origin} does not fit {model.config.name!r}: {problems}")
    model.load_state_dict(tensors)
    adopt(model, checkpoint, own_classifier=any(tensors[key] is own[key] for key in own if key.startswith(CLASSIFIER)))


def read_config(path: str | PathLike[str]) -> Mapping[str, Any]:
    """The config inside a file that `save_weights` wrote."""
    checkpoint = read(path)
    if checkpoint.config is None:
        raise WeightsError(
            f"{path} holds no Mixlab config, so the model cannot be rebuilt from it alone. "
            f"Name the model: create_model(NAME, weights=...)."
        )
    return checkpoint.config


def read(path: str | PathLike[str]) -> Checkpoint:
    """The tensors of a file, on the CPU."""
    file = Path(path)
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise WeightsError(f"The weight file {file} {what}.")
    try:
        return read_safetensors(file) if file.suffix == ".safetensors" else read_torch(file)
    except pickle.UnpicklingError as error:
        raise WeightsError(
            f"{file} is not a plain file of tensors, and Mixlab does not execute what is in it: "
            f"{first_line(error)} Save only the tensors (state_dict) with torch.save or safetensors."
        ) from error
    except (safetensors.SafetensorError, RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        raise WeightsError(f"{file} cannot be read as weights; it may be truncated: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def read_safetensors(file: Path) -> Checkpoint:
    with safetensors.safe_open(file, "pt") as opened:
        about = json.loads((opened.metadata() or {}).get(METADATA_KEY, "{}"))
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (not a mapping)
    return Checkpoint(str(file), tensors, about.get("config"), tuple(about.get("class_names", ())))


def read_torch(file: Path) -> Checkpoint:
    # timm's training checkpoints carry their arguments in a Namespace, which holds data only
    with torch.serialization.safe_globals([argparse.Namespace]):
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(loaded, Mapping):
        raise ValueError(f"it holds a {type(loaded).__name__}, not a mapping of tensors.")
    return Checkpoint(str(file), loaded)


def unwrap(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The tensors without the wrapping of training scripts, DDP and torch.compile."""
    tensors: Mapping[str, Any] = checkpoint.tensors
    for wrapper in WRAPPERS:
        if isinstance(tensors.get(wrapper), Mapping):
            tensors = tensors[wrapper]
    for prefix in PREFIXES:
        if tensors and all(key.startswith(prefix) for key in tensors):
            tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
    wrong = next((key for key, value in tensors.items() if not isinstance(value, Tensor)), None)
    if wrong is not None or not tensors:
        what = "it is empty" if wrong is None else f"{wrong!r} is a {type(tensors[wrong]).__name__}, not a tensor"
        raise WeightsError(f"{checkpoint.origin} is not a mapping of tensors: {what}.")
    return dict(tensors)


# -- layouts -------------------------------------------------------------------------------------

Rules = list[tuple[re.Pattern[str], str]]


@functools.cache
def layouts() -> dict[str, Rules]:
    """How other code names the parameters, from `configs/layouts`."""
    found: dict[str, Rules] = {}
    for file in (resources.files("mixlab") / "configs" / "layouts").iterdir():
        for source, layout in tomllib.loads(file.read_text(encoding="utf-8")).items():
            rules = [(re.compile(pattern), name) for pattern, name in layout["rename"]]
            found[f"{file.name.removesuffix('.toml')} {source}"] = rules
    return found


def rename(key: str, rules: Rules) -> str:
    for pattern, name in rules:
        match = pattern.fullmatch(key)
        if match:
            return match.expand(name)
    return key


def best_layout(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under our names, by the layout that explains most of the keys."""
    candidates = [{key: key for key in tensors}]
    candidates += [{key: rename(key, rules) for key in tensors} for rules in layouts().values()]
    names = max(candidates, key=lambda names: len(own.keys() & set(names.values())))
    return {names[key]: value for key, value in tensors.items()}


# -- fitting -------------------------------------------------------------------------------------


def fit(model: Backbone, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """Pointwise convolutions as linear layers, and tensors of another grid on the model's own."""
    grids = source_grids(model, config)
    own = model.state_dict()
    fitted = {}
    for key, value in tensors.items():
        if key in own and value.ndim > own[key].ndim and value.squeeze().shape == own[key].squeeze().shape:
            value = value.reshape(own[key].shape)
        resize = resizer(model, key) if key in own else None
        if resize is not None:
            value = resize(key.rsplit(".", 1)[1], value, None if grids is None else grids[int(key.split(".")[1])])
        fitted[key] = value
    return fitted


def resizer(model: Backbone, key: str) -> Callable[[str, Tensor, Grid | None], Tensor] | None:
    """The `resize` of the module that owns a tensor, if it is a part of a stage and has one."""
    if not key.startswith("stages."):
        return None
    return getattr(model.get_submodule(key.rsplit(".", 1)[0]), "resize", None)


def source_grids(model: Backbone, config: Mapping[str, Any] | None) -> tuple[Grid, ...] | None:
    """The stages' grids of the model that wrote a file; None where the file does not say."""
    if config is None:
        return None
    source = ModelConfig.parse(config)
    if source.image_size == model.config.image_size:
        return model.reference_grids
    with torch.device("meta"):
        return Backbone(source).reference_grids


def keep_own_classifier(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The classifier from the file where it fits whole, else the model's own."""
    mine = {key: value for key, value in own.items() if key.startswith(CLASSIFIER)}
    given = {key: value.shape for key, value in tensors.items() if key.startswith(CLASSIFIER)}
    if given == {key: value.shape for key, value in mine.items()}:
        return dict(tensors)
    return {key: value for key, value in tensors.items() if not key.startswith(CLASSIFIER)} | mine


def differences(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    """What keeps the tensors from filling the model, in words; empty if nothing does."""
    shapes = [
        f"{key} (file {list(tensors[key].shape)}, model {list(own[key].shape)})"
        for key in own.keys() & tensors.keys()
        if tensors[key].shape != own[key].shape
    ]
    told = [
        listed("missing", own.keys() - tensors.keys()),
        listed("unexpected", tensors.keys() - own.keys()),
        listed("mis-shaped", shapes),
    ]
    if shapes and all(shape.startswith(CLASSIFIER) for shape in shapes):
        told.append("for another number of classes, ask for it: load_weights(..., replace_classifier=True)")
    return "; ".join(part for part in told if part) + ("." if any(told) else "")


def listed(kind: str, keys: Iterable[str]) -> str:
    ordered = sorted(keys)
    more = f" and {len(ordered) - LISTED} more" if len(ordered) > LISTED else ""
    return f"{len(ordered)} {kind}: {', '.join(ordered[:LISTED])}{more}" if ordered else ""


def adopt(model: Backbone, checkpoint: Checkpoint, *, own_classifier: bool) -> None:
    """Take over what a file of ours says beside the tensors."""
    if checkpoint.config is not None:
        source = ModelConfig.parse(checkpoint.config)
        if source.in_channels == model.config.in_channels:
            model.config = replace(model.config, preprocessing=source.preprocessing)
    if not own_classifier:
        model.class_names = checkpoint.class_names
