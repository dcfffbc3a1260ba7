"""Gradients of models that stand still: what attacks, receptive fields and saliency maps have in common."""

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from mixlab.core.errors import MixlabError


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Gradients reach the images and nothing else, in eval mode too; the model is left as it was."""
    wanted = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    for parameter, _ in wanted:
        parameter.requires_grad_(False)
    try:
        with recurrence_as_in_training(model):
            yield
    finally:
        for parameter, before in wanted:
            parameter.requires_grad_(before)


def recurrence_as_in_training(model: nn.Module) -> AbstractContextManager[None]:
    """Without cuDNN where it would give no gradients: of PyTorch's own recurrent layers in eval mode."""
    foreign = any(isinstance(module, nn.RNNBase) for module in model.modules())
    return torch.backends.cudnn.flags(enabled=False) if foreign else nullcontext()


def captum(part: Literal["attr", "robust"]) -> Any:
    """A part of captum, or how to get it."""
    try:
        return importlib.import_module(f"captum.{part}")
    except ImportError as error:
        what = {"attr": "Saliency maps", "robust": "Attacks"}[part]
        raise MixlabError(f"{what} need captum, which is not installed: pip install 'mixlab[analysis]'") from error
