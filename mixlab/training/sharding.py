"""A model spread over processes: copies (DDP), or shards of every block (FSDP2)."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mixlab.core.errors import TrainingError
from mixlab.core.processes import Processes
from mixlab.models.build import build
from mixlab.models.dense_model import DenseModel, Trainable
from mixlab.models.ensemble import Ensemble

KINDS = ("ddp", "fsdp")


class Wrapped(NamedTuple):
    """What is called in training; `kind` is "single", "ddp" or "fsdp"."""

    module: nn.Module
    kind: str

    def train(self) -> None:
        self.module.train()

    @contextlib.contextmanager
    def with_whole_weights(self) -> Iterator[None]:
        """Shards gathered beforehand: evaluation then needs no process to wait for another's batches."""
        if self.kind != "fsdp":
            yield
            return
        from torch.distributed.fsdp import FSDPModule

        parts = [module for module in self.module.modules() if isinstance(module, FSDPModule)]
        for part in parts:
            part.unshard()
            part.set_reshard_after_forward(False)
        yield
        for part in parts:
            part.set_reshard_after_forward(True)
            part.reshard()

    @contextlib.contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        """Gradients travel between processes with the last batch of an update only."""
        if self.kind == "ddp" and not last:
            assert isinstance(self.module, DistributedDataParallel)
            with self.module.no_sync():
                yield
            return
        if self.kind == "fsdp":
            self.module.set_requires_gradient_sync(last)  # type: ignore[operator]
        yield


def wrap(model: Trainable, processes: Processes, kind: str) -> Wrapped:
    if kind not in KINDS:
        raise TrainingError(f"Unknown sharding {kind!r}: use {' or '.join(KINDS)}.")
    if processes.world == 1:
        return Wrapped(model, "single")
    dense = isinstance(model, DenseModel)
    if dense and processes.device.type == "cuda":  # few images per process: batch norm over all of them
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if kind == "ddp":
        device_ids = [processes.device] if processes.device.type == "cuda" else None
        warnings.filterwarnings("ignore", "Grad strides do not match")  # of kernels with one channel: one memory
        # a decoder need not read every map, so the last layers of some have no gradient
        wrapped = DistributedDataParallel(model, device_ids=device_ids, find_unused_parameters=dense)
        return Wrapped(wrapped, "ddp")
    from torch.distributed.fsdp import fully_shard

    backbone = model.backbone if isinstance(model, DenseModel) else model
    for block in backbone.blocks.values():
        fully_shard(block)
    fully_shard(model)
    return Wrapped(model, "fsdp")


def gather(
    wrapped: Wrapped, model: Trainable, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The whole state of model and optimizer, wherever its parts are."""
    if wrapped.kind != "fsdp":
        return model.state_dict(), optimizer.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states: tuple[dict[str, Any], dict[str, Any]] = get_state_dict(model, optimizer, options=options)
    return states


def whole(wrapped: Wrapped, model: Trainable, optimizer: torch.optim.Optimizer) -> Trainable:
    """A model of its own with the weights that the processes share; every process must ask."""
    weights, _ = gather(wrapped, model, optimizer)
    single = copy_without_values(model)
    if weights:  # the first process has them
        single.load_state_dict(weights, assign=True)
        single.class_names = model.class_names
    return single


def copy_without_values(model: Trainable) -> Trainable:
    with torch.device("meta"):
        if isinstance(model, DenseModel):
            from mixlab.dense.files import build_dense

            return build_dense(model.task, build(model.backbone.config), model.config.plain())
        parts = [build(backbone.config) for backbone in model.backbones]
        return Ensemble(parts, name=model.title, average=model.average) if isinstance(model, Ensemble) else parts[0]


def restore(
    wrapped: Wrapped,
    model: Trainable,
    optimizer: torch.optim.Optimizer,
    weights: dict[str, Any],
    moments: dict[str, Any],
) -> None:
    if wrapped.kind != "fsdp":
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    options = StateDictOptions(full_state_dict=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=options)
