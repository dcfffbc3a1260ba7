"""Every single model in timm's registry: `import mixlab.timm`, then `timm.create_model("mixlab_vil_tiny", ...)`.

Ensembles are left out: timm's conventions ask for one last map and one list of features, and an ensemble has one of
each per member. Their members are registered.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from mixlab.core.errors import ConfigError
from mixlab.core.grid import Grid
from mixlab.hub.timm_backbone import TimmBackbone
from mixlab.models.build import build_as
from mixlab.models.config import TWELFTHS, ModelConfig, Preprocessing
from mixlab.models.fitting import CLASSIFIER, absent_as_zeros, fit, keep_own_classifier
from mixlab.models.layouts import best_layout
from mixlab.models.papers import paper_of
from mixlab.models.released import Release, releases
from mixlab.models.stems import ConvolutionalStem, stem
from mixlab.models.weights import Checkpoint, unwrap
from mixlab.models.zoo import ensemble_row, list_models, model_config

PREFIX = "mixlab_"
INTERPOLATIONS = ("bicubic", "bilinear", "nearest")


def construct(
    name: str,
    *,
    num_classes: int = 1000,
    in_chans: int = 3,
    img_size: int | Sequence[int] | None = None,
    global_pool: str | None = None,
    drop_rate: float = 0.0,
    drop_path_rate: float | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **overrides: Any,
) -> TimmBackbone:
    """Build a model from timm's arguments; any other argument is a field of the config, such as `mixers`."""
    overrides |= {"num_classes": 0 if global_pool == "" else num_classes, "in_channels": in_chans}
    if img_size is not None:
        overrides["image_size"] = img_size if isinstance(img_size, int) else list(img_size)
    if drop_path_rate is not None:
        overrides["drop_path"] = {"rate": float(drop_path_rate)}
    with torch.device(device or torch.get_default_device()):
        model = build_as(TimmBackbone, model_config(name, **overrides))
    if global_pool is not None:
        model.reset_classifier(num_classes, global_pool)
    model.drop_rate = float(drop_rate)
    return model if dtype is None else model.to(dtype)


def converted(state: Mapping[str, Tensor], model: TimmBackbone) -> dict[str, Tensor]:
    """Return weights of any known layout as this model names and sizes them, without a classifier of other classes."""
    about = model.pretrained_cfg
    size = tuple(about["input_size"][1:])
    current = model.state_dict()
    tensors = best_layout("The checkpoint", unwrap(Checkpoint("The checkpoint", state)), current)
    tensors = absent_as_zeros(model, current) | fit(model, tensors, replace(model.config, image_size=size))
    return tensors if model.num_classes == about["num_classes"] else keep_own_classifier(tensors, current)


def entrypoint(name: str) -> Callable[..., nn.Module]:
    """Make the function that timm calls for a model."""

    def create(pretrained: bool = False, **options: Any) -> nn.Module:
        if options.get("feature_cls", "getter") != "getter":
            raise ConfigError(f"{PREFIX + name} gives its features as maps by feature_cls='getter' only.")
        config = model_config(name)
        indices = pyramid_indices(options.get("depths", config.depths), options.get("taps", config.taps))
        model = build_model_with_cfg(
            functools.partial(construct, name),
            f"{PREFIX}{name}",
            pretrained,
            pretrained_filter_fn=converted,
            feature_cfg={"out_indices": indices, "feature_cls": "getter"},
            **options,
        )
        if pretrained and isinstance(model, TimmBackbone):
            adopt(model, model.pretrained_cfg)
        return model

    create.__name__ = create.__qualname__ = f"{PREFIX}{name}"
    create.__doc__ = f"Mixlab's {name}."
    return create


def adopt(model: TimmBackbone, about: Mapping[str, Any]) -> None:
    """Take over what goes with loaded weights: how images are prepared, and the names of the classes."""
    if about["input_size"][0] == model.in_chans and about["interpolation"] in INTERPOLATIONS:
        preprocessing = Preprocessing(
            mean=tuple(about["mean"]),
            std=tuple(about["std"]),
            interpolation=about["interpolation"],
            crop=about["crop_pct"],
            crop_mode="squash" if about.get("crop_mode") == "squash" else "center",
            image_size=tuple(about["test_input_size"][1:]) if about.get("test_input_size") else None,
        )
        model.config = replace(model.config, preprocessing=preprocessing)
    names = about.get("label_names") or ()
    if len(names) == model.num_classes == about["num_classes"]:
        model.class_names = tuple(names)


def pyramid_indices(depths: Sequence[int], taps: Sequence[int]) -> tuple[int, ...]:
    """Return which of timm's features are the maps of `pyramid`: every stage, or the taps of a single one."""
    if len(depths) > 1:
        return tuple(range(len(depths)))
    return tuple(max(1, round(depths[0] * tap / TWELFTHS)) - 1 for tap in taps or (TWELFTHS,))


def default_cfg(config: ModelConfig, release: Release | None = None) -> dict[str, Any]:
    """Return what timm keeps besides a model; for a public checkpoint also its address."""
    size = config.image_size if release is None else (release.image_size, release.image_size)
    grid, first_conv = last_grid(config, size)
    preprocessing, paper = config.preprocessing, paper_of(config.family)
    cfg: dict[str, Any] = {
        "input_size": (config.in_channels, *size),
        "mean": preprocessing.mean,
        "std": preprocessing.std,
        "interpolation": preprocessing.interpolation,
        "crop_pct": preprocessing.crop,
        "crop_mode": preprocessing.crop_mode,
        "num_classes": config.num_classes,
        "pool_size": (grid.height, grid.width),
        "first_conv": first_conv if config.in_channels == 3 else None,  # timm adapts weights of three channels only
        "classifier": CLASSIFIER.rstrip("."),
    }
    if release is None and config.evaluation_size != tuple(size):
        cfg["test_input_size"] = (config.in_channels, *config.evaluation_size)
    if paper is not None:
        cfg |= {"paper_name": paper.title, "paper_ids": f"arXiv:{paper.arxiv}"}
    if release is not None:
        where = {"url": release.url} if release.url else {"hf_hub_id": release.repository}
        file = {} if release.url else {"hf_hub_filename": release.file}
        cfg |= {**where, **file, "license": release.license, "origin_url": release.page}
        cfg |= {"num_classes": release.num_classes, "crop_pct": release.crop or preprocessing.crop}
    return cfg


def last_grid(config: ModelConfig, size: Sequence[int]) -> tuple[Grid, str]:
    """Return the grid of the last stage and the name of the first convolution, without building the model."""
    grid = Grid(*size)
    with torch.device("meta"):
        first = stem(config.inherit(config.stem), config.in_channels, config.dims[0])
        grid = first.grid_after(grid)
        for index, choice in enumerate(config.downsample):
            grid = stem(choice, config.dims[index], config.dims[index + 1]).grid_after(grid)
    return grid, "stem.layers.0.conv" if isinstance(first, ConvolutionalStem) else "stem.conv"


def all_cfgs() -> dict[str, dict[str, Any]]:
    cfgs = {}
    for name in NAMES:
        config = model_config(name)
        for tag, release in releases().get(name, {"": None}).items():
            cfgs[f"{PREFIX}{name}.{tag}".rstrip(".")] = default_cfg(config, release)
    return cfgs


NAMES = [name for name in list_models() if ensemble_row(name) is None]
default_cfgs = generate_default_cfgs(all_cfgs())  # timm looks for it under this name
for registered in NAMES:
    register_model(entrypoint(registered))
