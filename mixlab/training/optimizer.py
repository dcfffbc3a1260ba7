"""Parameters in groups, the optimizer over them, and the learning rate at every update."""

import fnmatch
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch import nn

from mixlab.core.errors import ConfigError
from mixlab.models.dense_model import HEAD, DenseModel, Trainable
from mixlab.training.recipe import Optimizer, Recipe, Schedule


def freeze(model: Trainable, recipe: Recipe) -> None:
    """Leave only what the recipe trains with gradients."""
    if recipe.train_only == "head":
        kept = set(dict(model.layer_order)[HEAD])
        if not (isinstance(model, DenseModel) or any(re.match(r"(.*\.)?head\.", name) for name in kept)):
            raise ConfigError("train_only = 'head' needs a head: create the model with num_classes of 1 or more.")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in kept and parameter.requires_grad)


def parameter_groups(model: Trainable, optimizer: Optimizer) -> list[dict[str, Any]]:
    """One group per layer and kind of decay, from the image to the head; timm's schedulers obey `lr_scale`."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ConfigError("Nothing to train: every parameter of the model is frozen.")
    order, spared = model.layer_order, model.no_decay
    spared -= model.decayed_when_released if optimizer.decay_filters else frozenset()
    factors = rate_factors(parameters, optimizer)
    layers = [name for name, _ in order]
    steps = convnext_steps(layers) if optimizer.layer_groups == "convnext" else range(len(order) - 1, -1, -1)
    groups = []
    for place, ((_, names), step) in enumerate(zip(order, steps, strict=True)):
        scale = optimizer.layer_decay**step * (optimizer.backbone_scale if place < len(order) - 1 else 1.0)
        for name in names:
            if name in parameters:
                decay = 0.0 if name in spared else optimizer.weight_decay
                factor = scale * factors.get(name, 1.0)
                groups.append({"params": [parameters[name]], "weight_decay": decay, "lr_scale": factor})
    return merged(groups)


def rate_factors(names: Iterable[str], optimizer: Optimizer) -> dict[str, float]:
    """The factor of each parameter that a pattern fits; the first that fits counts."""
    known = list(names)
    found: dict[str, float] = {}
    for pattern, factor in reversed(optimizer.rate_factors):
        found |= dict.fromkeys(fnmatch.filter(known, pattern), float(factor))
    if optimizer.rate_factors and not found:
        told = ", ".join(repr(pattern) for pattern, _ in optimizer.rate_factors)
        raise ConfigError(f"No trained parameter fits the rate_factors {told}; names are such as {known[-1]!r}.")
    return found


def convnext_steps(layers: Sequence[str]) -> list[int]:
    """How many of ConvNeXt's groups lie between each layer and the head: 7 for the stem, 1 for the last stage."""
    places = [re.fullmatch(r"(?:.*\.)?stages\.(\d+)\.blocks\.(\d+)", name) for name in layers]
    blocks = [(int(place[1]), int(place[2])) for place in places if place is not None]
    if {stage for stage, _ in blocks} != {0, 1, 2, 3}:
        raise ConfigError("layer_groups = 'convnext' is for models of four stages. Use layer_groups = 'blocks'.")
    third = 1 + max(block for stage, block in blocks if stage == 2)

    def group(layer: str, place: "re.Match[str] | None") -> int:
        if place is None:
            return 0 if layer.endswith("stem") else 7
        stage, block = int(place[1]), int(place[2])
        return (1, 2, 3 + 3 * block // third, 6)[stage]

    return [7 - group(layer, place) for layer, place in zip(layers, places, strict=True)]


def merged(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups with the same settings as one: fewer, larger steps."""
    found: dict[tuple[float, float], dict[str, Any]] = {}
    for group in groups:
        key = (group["weight_decay"], group["lr_scale"])
        if key in found:
            found[key]["params"] = found[key]["params"] + group["params"]
        else:
            found[key] = dict(group)
    return list(found.values())


def learning_rate(recipe: Recipe) -> float:
    """The peak, scaled with the batch as the paper does."""
    optimizer = recipe.optimizer
    return optimizer.lr if optimizer.lr_divisor is None else optimizer.lr * recipe.batch_size / optimizer.lr_divisor


def build_optimizer(model: Trainable, recipe: Recipe) -> torch.optim.Optimizer:
    settings = recipe.optimizer
    extra: dict[str, Any] = {"betas": settings.betas, "eps": settings.eps}
    sharded = any(hasattr(parameter, "placements") for parameter in model.parameters())
    if settings.name == "sgd":
        extra = {"momentum": settings.betas[0]}
    elif settings.name == "adamw" and not sharded:
        extra["fused"] = True  # a quarter of the time on a CPU
    groups = parameter_groups(model, settings)
    name = "momentum" if settings.name == "sgd" else settings.name  # timm's "sgd" is Nesterov's
    return create_optimizer_v2(groups, opt=name, lr=learning_rate(recipe), weight_decay=0.0, **extra)


def total_updates(schedule: Schedule, updates_per_epoch: int) -> int:
    """All updates of a run, the cool-down included."""
    length = schedule.updates if schedule.updates is not None else (schedule.epochs or 0) * updates_per_epoch
    return length + schedule.cooldown_epochs * updates_per_epoch


class LearningRate:
    """Warm-up from `warmup_lr`, then what the schedule says, then the cool-down: a function of the update."""

    def __init__(self, optimizer: torch.optim.Optimizer, recipe: Recipe, updates_per_epoch: int) -> None:
        schedule, peak = recipe.schedule, learning_rate(recipe)
        length = total_updates(schedule, updates_per_epoch) - schedule.cooldown_epochs * updates_per_epoch
        warmup = min(schedule.warmup_updates or schedule.warmup_epochs * updates_per_epoch, length)
        self.optimizer = optimizer
        self.scheduler = scheduler(optimizer, schedule, peak, length, warmup, updates_per_epoch)

    def set(self, update: int) -> float:
        """Prepare the optimizer for an update, counted from 0; the rate of layers next to the head."""
        self.scheduler.step_update(update)
        return max(float(group["lr"]) for group in self.optimizer.param_groups)


def scheduler(
    optimizer: torch.optim.Optimizer, schedule: Schedule, peak: float, length: int, warmup: int, updates_per_epoch: int
) -> Scheduler:
    """timm's, which counts updates and heeds every group's `lr_scale`."""
    common = {"warmup_t": warmup, "warmup_lr_init": min(schedule.warmup_lr, peak), "t_in_epochs": False}
    least = min(schedule.min_lr, peak)
    if schedule.name == "step":
        unit = 1 if schedule.epochs is None else updates_per_epoch
        turns = [unit * milestone + 1 for milestone in schedule.milestones]  # timm turns one update early
        return MultiStepLRScheduler(optimizer, decay_t=turns, decay_rate=schedule.factor, warmup_prefix=False, **common)
    prefix = schedule.warmup_prefix
    common |= {"t_initial": max(1, length - warmup if prefix else length), "warmup_prefix": prefix}
    if schedule.name == "polynomial":
        return PolyLRScheduler(optimizer, power=schedule.power, lr_min=least, **common)
    return CosineLRScheduler(optimizer, lr_min=least if schedule.name == "cosine" else peak, **common)


def clip(model: nn.Module, limit: float | None) -> torch.Tensor:
    """The norm of all gradients, which are shortened to the limit."""
    trained = [p for p in model.parameters() if p.grad is not None]
    whole = not any(hasattr(parameter, "placements") for parameter in trained)
    foreach = whole or None
    norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None], foreach=foreach)
    # elsewhere than on a CPU, looking at the norm would cost more than a product with 1
    if limit is not None and (norm.device.type != "cpu" or not norm <= limit):
        torch.nn.utils.clip_grads_with_norm_(trained, limit, norm, foreach=foreach)
    return norm
