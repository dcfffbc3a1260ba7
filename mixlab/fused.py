"""A residual branch as one call of kernels: norm, mixer and sum, for inference on a CPU.

A mixer that can be written down as steps of `mixlab.native.steps` says so by a `recipe`. Steps are kept while every
tensor that they point at lies where it lay.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from mixlab.kept import Place
from mixlab.native import may_run
from mixlab.native.steps import Place as Somewhere
from mixlab.native.steps import Steps, Sum

MOST = 4  # image sizes that steps are kept for, those that were used last


class Recipe(NamedTuple):
    """What a mixer's steps are made of: the modules that they stand for, the tensors that they point at, whatever else
    decides about them, and how they are written down: `write(steps, input, sum)`. `fits`: whether the tensors belong
    together. `around`: how tokens are put in order in front of the steps, and back.
    """

    modules: tuple[nn.Module, ...]
    tensors: tuple[Tensor | None, ...]
    key: Hashable
    write: Callable[[Steps, Somewhere, Sum], None]
    fits: bool
    around: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None = None


class Plan:
    """Steps and where the tensors lay that they point at."""

    def __init__(self, steps: Steps, tensors: Sequence[Tensor | None]) -> None:
        self.steps = steps
        self.places = [None if one is None else Place(one) for one in tensors]

    def holds(self, tensors: Sequence[Tensor | None]) -> bool:
        for place, tensor in zip(self.places, tensors, strict=True):
            if tensor is None or place is None:
                if tensor is not None or place is not None:
                    return False
            elif not place.holds(tensor):
                return False
        return True


class Plans:
    """The plans of a layer for the sizes it saw last. Copies of a layer and files start with none."""

    def __init__(self) -> None:
        self.known: dict[Hashable, Plan] = {}

    def find(self, key: Hashable, tensors: Sequence[Tensor | None]) -> Steps | None:
        plan = self.known.get(key)
        if plan is None or not plan.holds(tensors):
            return None
        if next(reversed(self.known)) != key:  # used last: to the end
            self.known = {**{other: one for other, one in self.known.items() if other != key}, key: plan}
        return plan.steps

    def keep(self, key: Hashable, tensors: Sequence[Tensor | None], steps: Steps) -> None:
        others = [(other, plan) for other, plan in self.known.items() if other != key]
        self.known = dict([*others[1 - MOST :], (key, Plan(steps, tensors))])  # at once: other threads may be reading

    def __deepcopy__(self, memo: object) -> "Plans":
        return Plans()

    def __reduce__(self) -> tuple[Any, ...]:
        return Plans, ()


def are_plain(modules: Sequence[nn.Module]) -> bool:
    """Whether nobody listens to or changes the call of any of these: hooks, pruning, another forward, a compiler."""
    if _has_any_global_hook():
        return False
    for module in modules:
        own = module.__dict__
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
            return False
        if own["_backward_hooks"] or own["_backward_pre_hooks"] or own.get("_compiled_call_impl") is not None:
            return False
    return True


def is_chain(dim: int, *layers: tuple[Tensor, Tensor | None], keeps: bool = True) -> bool:
    """Whether linear layers, weight (out, in) and bias each, take such tokens one behind the other, and give as many
    channels if it `keeps` them.
    """
    last = dim
    for weight, bias in layers:
        if weight.ndim != 2 or weight.shape[1] != last or not (bias is None or bias.shape == weight.shape[:1]):
            return False
        last = len(weight)
    return last == dim or not keeps


def has_taps(channels: int, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a depthwise convolution has a kernel for each of so many channels."""
    return weight.ndim == 4 and weight.shape[:2] == (channels, 1) and (bias is None or bias.shape == (channels,))


def may_point_at(tensors: Sequence[Tensor | None]) -> bool:
    """Whether kernels can read these where they lie."""
    return may_run(*tensors) and all(one is None or one.is_contiguous() for one in tensors)


def is_alone() -> bool:
    """Whether nothing follows the arithmetic: the question that is cheapest to ask first."""
    return not (torch.compiler.is_compiling() or torch.is_grad_enabled())
