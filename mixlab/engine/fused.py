"""A residual branch as one call of kernels: norm, mixer and sum, for inference on a CPU.

A mixer that can be written down as steps of `mixlab.engine.kernels.steps` says so by a `recipe`. Steps are kept while
the modules are as they were and every tensor lies where it lay.
"""

import itertools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from mixlab.engine.kernels import may_run
from mixlab.engine.kernels.steps import Place, Steps, Sum

MOST = 4  # image sizes that steps are kept for, those that were used last


class Recipe(NamedTuple):
    """What a mixer's steps are made of: the modules that they stand for, the parameters that they point at, and how
    they are written down: `write(steps, input, sum)`. `fits`: whether the tensors belong together. `around`: how tokens
    are put in order in front of the steps, and back. `made`: what else steps point at, made from parameters. `holds`:
    whether that, and numbers that steps were given, are as they were.
    """

    modules: tuple[nn.Module, ...]
    tensors: tuple[Tensor | None, ...]
    write: Callable[[Steps, Place, Sum], None]
    fits: bool
    around: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None = None
    made: tuple[Tensor | None, ...] = ()
    holds: Callable[[], bool] | None = None


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
Placed = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]


class Snapshot:
    """Modules, all that they hold, and where their tensors lie, as they were when steps were written down. In front of
    every branch it is asked whether that is still so, hence all at once instead of one by one.

    It keeps what it watches alive, so it must not watch whoever keeps it.
    """

    def __init__(
        self, whole: Sequence[nn.Module], alone: Sequence[nn.Module], others: Sequence[dict[str, Any]]
    ) -> None:
        """Modules with all that is inside, modules without that, and other attributes. Hooks of the modules themselves
        are looked for, not those of what is inside, which need not be called.
        """
        inside = [child for module in whole for child in module.modules()]
        self.modules = list(dict.fromkeys([*alone, *inside]))
        self.kinds = [type(module) for module in self.modules]
        owns = [module.__dict__ for module in self.modules]
        parts = [own[name] for own in owns for name in ("_parameters", "_buffers")]
        self.hooks = [module.__dict__[name] for module in (*whole, *alone) for name in HOOKS]
        self.dicts = [*others, *owns, *(own["_modules"] for own in owns), *parts]
        self.lengths = [len(one) for one in self.dicts]
        self.names = list(itertools.chain.from_iterable(self.dicts))
        self.values = [value for one in self.dicts for value in one.values()]
        given = (one for part in parts for one in part.values())
        self.tensors: list[Tensor] = [one for one in given if one is not None and one.layout is torch.strided]
        self.places = self.placed()

    def watches(self, tensors: Sequence[Tensor | None]) -> bool:
        known = set(map(id, self.tensors))
        return all(one is None or id(one) in known for one in tensors)

    def placed(self) -> list[Placed]:
        return [(one.data_ptr(), one.dtype, one.shape, one.stride()) for one in self.tensors]

    def holds(self) -> bool:
        if any(self.hooks) or _has_any_global_hook() or [len(one) for one in self.dicts] != self.lengths:
            return False
        values = itertools.chain.from_iterable([one.values() for one in self.dicts])
        if not all(map(operator.is_, values, self.values)):
            return False
        if list(itertools.chain.from_iterable(self.dicts)) != self.names:
            return False
        return [type(module) for module in self.modules] == self.kinds and self.placed() == self.places


class Plan(NamedTuple):
    """Steps, what they stand for, whose parts these are, and a norm that has to be called in front of them."""

    steps: Steps
    snapshot: Snapshot
    recipe: Recipe
    owner: dict[str, Any]
    norm: nn.Module | None

    def holds(self) -> bool:
        return self.snapshot.holds() and (self.recipe.holds is None or self.recipe.holds())

    def run(self, tokens: Tensor, normed: Tensor | None) -> Tensor:
        """The sum of tokens and the branch, whose norm is among the steps unless normed tokens are given."""
        if self.recipe.around is None:
            return self.steps.run(tokens if normed is None else normed.contiguous(), tokens)
        there, back = self.recipe.around
        stream = there(tokens).contiguous()
        return back(self.steps.run(stream if normed is None else there(normed).contiguous(), stream))


class Plans:
    """The plans of a layer for the sizes it saw last. Copies of a layer and files start with none."""

    def __init__(self) -> None:
        self.known: dict[Hashable, Plan] = {}

    def find(self, key: Hashable, owner: dict[str, Any]) -> Plan | None:
        known = self.known  # other threads may put another in its place
        plan = known.get(key)
        if plan is None or plan.owner is not owner or not plan.holds():
            if known:  # what does not hold would keep alive what nobody uses
                self.known = {other: one for other, one in known.items() if one is not plan and one.holds()}
            return None
        if next(reversed(known)) != key:  # used last: to the end
            self.known = {**{other: one for other, one in known.items() if other != key}, key: plan}
        return plan

    def keep(self, key: Hashable, plan: Plan) -> None:
        others = [(other, one) for other, one in self.known.items() if other != key]
        self.known = dict([*others[1 - MOST :], (key, plan)])  # at once: other threads may be reading

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
        if any(own[name] for name in HOOKS) or "forward" in own or own.get("_compiled_call_impl") is not None:
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
