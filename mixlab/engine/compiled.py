"""How compiled code meets the engine: for inference on a CPU kernels are faster than what compilers write.

Compiled code calls one operator with the number of a part and its tensors; the operator finds the part and runs its
plan. Graphs become a few nodes, which parts of a kind share as before.
"""

import copy
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mixlab.core.compat import differentiates_forwards, transforms
from mixlab.core.errors import CompileError
from mixlab.core.grid import Grid
from mixlab.core.guards import is_constant, is_exported
from mixlab.core.parts import PARTS, Part
from mixlab.engine.kernels import HAS_TAGS, OPERATOR_TAGS, has_wide_vectors
from mixlab.engine.serve import serve_part
from mixlab.models.modules import Shared

CAN_TELL = hasattr(torch.compiler, "is_exporting")  # else a graph for other programs may be in the making


def as_operator(part: nn.Module, tokens: Tensor, grid: Any) -> Tensor | None:
    """part(tokens, grid) as one operator, if this is being compiled for inference where kernels do better."""
    if torch.is_grad_enabled() or part.training or not isinstance(part, Part) or not keeps_shape(part, tokens):
        return None
    plain = tokens.device.type == "cpu" and tokens.dtype is torch.float32 and tokens.ndim == 3
    followed = torch.is_autocast_enabled("cpu") or differentiates_forwards()
    if not (plain and CAN_TELL) or followed or is_exported() or not serves_compiled_code():
        return None
    if transforms():
        return None
    tensors = tensors_of(part)
    return None if tensors is None else call_part(tokens, part.number, tensors, *grid)


def keeps_shape(part: nn.Module, tokens: Tensor) -> bool:
    """Whether a part gives as many channels as it takes."""
    last = getattr(part, "fc2", None)  # of an MLP, which need not
    return last is None or getattr(last, "out_features", None) == tokens.shape[-1]


# -- whether the part is as it was compiled ------------------------------------------------------


def tensors_of(module: nn.Module) -> list[Tensor] | None:
    """All that it computes with, or None if a mixer is better compiled, or something is unknown or stands in for a
    parameter: sharding, `torch.func.functional_call`. A compiler follows this in half of the time that it takes for
    the module's iterators.
    """
    if not getattr(type(module), "outruns_compilers", True):
        return None
    tensors: list[Tensor] = []
    for one in module._parameters.values():
        if one is not None:
            if type(one) is not nn.Parameter:
                return None
            tensors.append(one)
    for held in module._buffers.values():
        if held is not None:
            if type(held) is not Tensor:
                return None
            tensors.append(held)
    inside = [child for child in module._modules.values() if child is not None]
    for name in getattr(type(module), "calls", ()):
        called = getattr(module, name)
        if isinstance(called, Shared):
            inside.append(called.module)
        elif called is not None and not isinstance(called, nn.Module):
            return None
    for child in inside:
        its = tensors_of(child)
        if its is None:
            return None
        tensors += its
    return tensors


@is_constant
def serves_compiled_code() -> bool:
    """Not where inductor makes constants of a module's tensors: it would take one part's number for all of a kind."""
    settings = sys.modules.get("torch._inductor.config")
    freezes = settings is not None and bool(getattr(settings, "freezing", False))
    return HAS_TAGS and has_wide_vectors() and not freezes


# -- the operator --------------------------------------------------------------------------------


@torch.library.custom_op("mixlab::part", mutates_args=(), device_types="cpu", **OPERATOR_TAGS)
def call_part(
    tokens: Tensor, number: Tensor, tensors: Sequence[Tensor], height: int, width: int, prefix: int
) -> Tensor:
    part = PARTS.get(int(number))
    if part is None:
        raise CompileError("Compiled code calls a block of a model that is no longer there.")
    own = tensors_of(part)
    if own is None or len(own) != len(tensors) or not all(map(is_same, own, tensors)):
        part = with_tensors(part, own, tensors)
    grid = Grid(height, width, prefix)
    served = serve_part(part, tokens, grid)
    if served is not None:
        return served
    out: Tensor = type(part).forward(part, tokens, grid)
    same = out.untyped_storage().data_ptr() == tokens.untyped_storage().data_ptr()
    return out.clone(memory_format=torch.contiguous_format) if same else out.contiguous()


@call_part.register_fake
def _(tokens: Tensor, *others: object) -> Tensor:
    return tokens.new_empty(tokens.shape)


def is_same(own: Tensor, given: Tensor) -> bool:
    """Whether compiled code hands on a part's own tensor; single numbers it may have copied."""
    if own is given:
        return True
    if own.shape != given.shape or own.dtype is not given.dtype or own.layout is not given.layout:
        return False
    if own.numel() == 1:
        return bool(own == given)
    return own.layout is torch.strided and own.stride() == given.stride() and own.data_ptr() == given.data_ptr()


def with_tensors(part: Part, own: list[Tensor] | None, given: Sequence[Tensor]) -> Part:
    """A copy of the part with other tensors: compiled code has changed its weights, or was given others for them."""
    if own is None or len(own) != len(given):
        raise CompileError("Compiled code was made for other weights than this block has now: compile it again.")
    memo: dict[int, Any] = {id(one): other for one, other in zip(own, given, strict=True)}
    return copy.deepcopy(part, memo)
