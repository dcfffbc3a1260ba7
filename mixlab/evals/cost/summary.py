"""What a model is, in numbers: one row per model, one row per part of a model. Nothing is computed on data."""

import functools
import json
from dataclasses import dataclass
from importlib import resources

import torch
from torch import nn

from mixlab.core.grid import Grid
from mixlab.metrics.macs import macs_by_part
from mixlab.models.backbone import Backbone
from mixlab.models.build import build
from mixlab.models.config import ModelConfig
from mixlab.models.zoo import create_model, ensemble_row, list_models, model_config


@dataclass(frozen=True)
class ModelSummary:
    name: str
    family: str
    mixers: tuple[str, ...]
    image_size: tuple[int, int]
    params: int  # trainable
    frozen: int
    macs: int
    paper_top1: float | None  # trained on ImageNet-1K alone, at the config's own image size


@dataclass(frozen=True)
class PartSummary:
    part: str
    content: str
    output: tuple[int, ...]  # channels, height, width; classes for the head
    stride: int | None
    params: int  # trainable
    frozen: int
    macs: int


def shadow(config: ModelConfig) -> Backbone:
    """The model without data."""
    with torch.device("meta"):
        return build(config)


def count(module: nn.Module, *, trainable: bool) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad == trainable)


def summarize(name: str) -> ModelSummary:
    """One row of the model table; counting every model anew would take as long as the list is long."""
    ensemble = ensemble_row(name)
    config = model_config(name if ensemble is None else ensemble.members[0])
    about = ensemble or config
    height, width = config.image_size
    top1 = [row.top1 for row in about.reported if row.pretraining is None and row.image_size == height]
    mixers = tuple(choice.name for choice in config.mixers) if ensemble is None else ensemble.members
    counts = stored_counts().get(name) or count_model(name)
    return ModelSummary(name, about.family, mixers, (height, width), **counts, paper_top1=top1[0] if top1 else None)


def count_model(name: str) -> dict[str, int]:
    """Parameters and multiply-accumulates of a named model at its own image size."""
    with torch.device("meta"):
        model = create_model(name)
    height, width = model.config.image_size
    params, frozen = count(model, trainable=True), count(model, trainable=False)
    return {"params": params, "frozen": frozen, "macs": sum(macs_by_part(model, (height, width)).values())}


@functools.cache
def stored_counts() -> dict[str, dict[str, int]]:
    """What `make counts` wrote: `count_model` of every name. The tests count again."""
    file = resources.files("mixlab") / "configs" / "counts.json"
    return json.loads(file.read_text(encoding="utf-8"))


def describe_parts(config: ModelConfig, image_size: tuple[int, int]) -> list[PartSummary]:
    """The data flow part by part for images of this size."""
    model = shadow(config)
    macs = macs_by_part(model, image_size)
    grid = model.stem.grid_after(Grid(*image_size))

    def part(name: str, content: str, output: tuple[int, ...], stride: int | None, *modules: nn.Module) -> PartSummary:
        params = sum(count(module, trainable=True) for module in modules)
        frozen = sum(count(module, trainable=False) for module in modules)
        return PartSummary(name, content, output, stride, params, frozen, macs.get(name, 0))

    first = (config.dims[0], grid.height, grid.width)
    parts = [part("stem", config.stem.name, first, model.stem.stride, model.stem)]
    for index, stage in enumerate(model.stages):
        if stage.downsample is not None:
            grid = stage.downsample.grid_after(grid)
        output = (config.dims[index], grid.height, grid.width)
        content = f"{config.depths[index]} x {config.mixers[index].name}"
        parts.append(part(f"stages.{index}", content, output, model.strides[index], stage))
    if config.coscale is not None and model.coscale is not None:
        content = f"{config.coscale.blocks} x {config.coscale.scales} scales, {config.coscale.exchange}"
        parts.append(part("coscale", content, output, None, model.coscale))
    classes = config.num_classes or config.dims[-1]
    return [*parts, part("head", config.head.name, (classes,), None, model.readout, model.head)]


def describe_member(config: ModelConfig, image_size: tuple[int, int]) -> PartSummary:
    """A whole model as one part of an ensemble."""
    model = shadow(config)
    content = ", ".join(dict.fromkeys(choice.name for choice in config.mixers))
    params, frozen = count(model, trainable=True), count(model, trainable=False)
    macs = sum(macs_by_part(model, image_size).values())
    return PartSummary(config.name, content, (config.num_classes or config.dims[-1],), None, params, frozen, macs)


if __name__ == "__main__":
    print(json.dumps({name: count_model(name) for name in list_models()}, indent=1))
