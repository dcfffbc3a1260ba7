"""Tensors of a file as they fill a model: resized, the classifier kept or not, and what differs said in words."""

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
    """Tensors without or with axes of 1, as of pointwise convolutions, and tensors of another grid on the model's."""
    grids = source_grids(model, config)
    own = model.state_dict()
    fitted = {}
    for key, value in tensors.items():
        if key in own and value.ndim != own[key].ndim and value.squeeze().shape == own[key].squeeze().shape:
            value = value.reshape(own[key].shape)
        resize = resizer(model, key) if key in own else None
        if resize is not None and (grids is not None or value.shape != own[key].shape):
            value = resize(key.rsplit(".", 1)[1], value, None if grids is None else grids[int(key.split(".")[1])])
        fitted[key] = value
    return fitted


def absent_as_zeros(model: Backbone, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that a file may lack, because zeros say the same: what a module declares as `optional`."""
    names = {f"{path}.{name}" for path, module in model.named_modules() for name in getattr(module, "optional", ())}
    return {key: torch.zeros_like(own[key], device="cpu") for key in names & own.keys()}


def resizer(model: Backbone, key: str) -> Callable[[str, Tensor, Grid | None], Tensor] | None:
    """The `resize` of the module that owns a tensor, if it is a part of a stage and has one."""
    if not key.startswith("stages."):
        return None
    return getattr(model.get_submodule(key.rsplit(".", 1)[0]), "resize", None)


def source_grids(model: Backbone, config: ModelConfig | None) -> tuple[Grid, ...] | None:
    """The stages' grids of the model that wrote a file; None where the file does not say."""
    if config is None:
        return None
    if config.image_size == model.config.image_size:
        return model.reference_grids
    with torch.device("meta"):
        return build(config).reference_grids


def keep_own_classifier(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Classifier and norm from the file where they fit whole, else the model's own; without one, the head goes too."""
    has_classifier = any(key.startswith(CLASSIFIER) for key in own)
    kept = dict(tensors)
    for prefix in (CLASSIFIER, HEAD_NORM) if has_classifier else ("head.",):
        mine = {key: value for key, value in own.items() if key.startswith(prefix)}
        given = {key: value.shape for key, value in tensors.items() if key.startswith(prefix)}
        if given != {key: value.shape for key, value in mine.items()}:
            kept = {key: value for key, value in kept.items() if not key.startswith(prefix)} | mine
    return kept


def differences(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    """What keeps the tensors from filling the model, in words; empty if nothing does."""
    shapes = {key for key in own.keys() & tensors.keys() if tensors[key].shape != own[key].shape}
    missing, unexpected = own.keys() - tensors.keys(), tensors.keys() - own.keys()
    told = [
        listed("missing", missing),
        listed("unexpected", unexpected),
        listed(
            "mis-shaped", (f"{key} (file {list(tensors[key].shape)}, model {list(own[key].shape)})" for key in shapes)
        ),
    ]
    wrong = shapes | missing | unexpected
    if wrong and all(key.startswith(HEAD_NORM) for key in wrong) and not shapes:
        has = "has no" if missing else "has a"
        told.append(
            f"the file {has} norm in front of its classifier: create_model(..., head={{'norm': {not missing}}})"
        )
        wrong = set()
    if wrong and all(key.startswith("head.") for key in wrong):
        told.append(
            "only the head differs: build the model with the file's num_classes to keep it, "
            "or leave it out with load_weights(..., replace_classifier=True)"
        )
    problems = [part for part in told if part]
    return "; ".join(problems) + ("." if problems else "")


def listed(kind: str, keys: Iterable[str]) -> str:
    ordered = sorted(keys)
    more = f" and {len(ordered) - LISTED} more" if len(ordered) > LISTED else ""
    return f"{len(ordered)} {kind}: {', '.join(ordered[:LISTED])}{more}" if ordered else ""
