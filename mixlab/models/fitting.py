"""Make the tensors of a file fill a model: resize them, keep or drop the classifier, put differences into words."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from mixlab.core.grid import Grid
from mixlab.models.backbone import Backbone
from mixlab.models.build import build
from mixlab.models.config import ModelConfig

CLASSIFIER = "head.classifier."
HEAD_NORM = "head.norm."
LISTED = 10  # how many keys of a kind an error names
# fields of a config that say nothing about what the weights compute
FREE_FIELDS = (
    *("name", "family", "paper", "image_size", "num_classes", "drop_path", "init", "preprocessing", "reported"),
    *("taps", "recipe"),
)


def fit(model: Backbone, tensors: Mapping[str, Tensor], config: ModelConfig | None) -> dict[str, Tensor]:
    """Reshape tensors that differ in axes of 1, as of pointwise convolutions, and resize those of another grid."""
    grids = source_grids(model, config)
    current = model.state_dict()
    fitted = {}
    for key, value in tensors.items():
        if key in current and value.ndim != current[key].ndim and value.squeeze().shape == current[key].squeeze().shape:
            value = value.reshape(current[key].shape)
        resize = resizer(model, key) if key in current else None
        if resize is not None and (grids is not None or value.shape != current[key].shape):
            value = resize(key.rsplit(".", 1)[1], value, None if grids is None else grids[int(key.split(".")[1])])
        fitted[key] = value
    return fitted


def absent_as_zeros(model: Backbone, current: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return zeros for the tensors that a file may lack: those that a module declares as `optional`."""
    names = {f"{path}.{name}" for path, module in model.named_modules() for name in getattr(module, "optional", ())}
    return {key: torch.zeros_like(current[key], device="cpu") for key in names & current.keys()}


def resizer(model: Backbone, key: str) -> Callable[[str, Tensor, Grid | None], Tensor] | None:
    """Return the `resize` of the module that owns a tensor, if that is a part of a stage and has one."""
    if not key.startswith("stages."):
        return None
    return getattr(model.get_submodule(key.rsplit(".", 1)[0]), "resize", None)


def source_grids(model: Backbone, config: ModelConfig | None) -> tuple[Grid, ...] | None:
    """Return the grids of the stages of the model that wrote a file, or None if the file does not say."""
    if config is None:
        return None
    if config.image_size == model.config.image_size:
        return model.reference_grids
    with torch.device("meta"):
        return build(config).reference_grids


def keep_own_classifier(tensors: Mapping[str, Tensor], current: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Take classifier and norm from the file where they fit whole, else from the model; drop the head of a model
    without classes.
    """
    has_classifier = any(key.startswith(CLASSIFIER) for key in current)
    kept = dict(tensors)
    for prefix in (CLASSIFIER, HEAD_NORM) if has_classifier else ("head.",):
        mine = {key: value for key, value in current.items() if key.startswith(prefix)}
        given = {key: value.shape for key, value in tensors.items() if key.startswith(prefix)}
        if given != {key: value.shape for key, value in mine.items()}:
            kept = {key: value for key, value in kept.items() if not key.startswith(prefix)} | mine
    return kept


def differences(tensors: Mapping[str, Tensor], current: Mapping[str, Tensor]) -> str:
    """Say in words what keeps the tensors from filling the model; empty if nothing does."""
    shapes = {key for key in current.keys() & tensors.keys() if tensors[key].shape != current[key].shape}
    missing, unexpected = current.keys() - tensors.keys(), tensors.keys() - current.keys()
    parts = [
        listed("missing", missing),
        listed("unexpected", unexpected),
        listed(
            "mis-shaped",
            (f"{key} (file {list(tensors[key].shape)}, model {list(current[key].shape)})" for key in shapes),
        ),
    ]
    wrong = shapes | missing | unexpected
    if wrong and all(key.startswith(HEAD_NORM) for key in wrong) and not shapes:
        has = "has no" if missing else "has a"
        parts.append(
            f"the file {has} norm in front of its classifier: create_model(..., head={{'norm': {not missing}}})"
        )
        wrong = set()
    if wrong and all(key.startswith("head.") for key in wrong):
        parts.append(
            "only the head differs: build the model with the file's num_classes to keep it, "
            "or leave it out with load_weights(..., replace_classifier=True)"
        )
    problems = [part for part in parts if part]
    return "; ".join(problems) + ("." if problems else "")


def listed(kind: str, keys: Iterable[str]) -> str:
    ordered = sorted(keys)
    more = f" and {len(ordered) - LISTED} more" if len(ordered) > LISTED else ""
    return f"{len(ordered)} {kind}: {', '.join(ordered[:LISTED])}{more}" if ordered else ""
