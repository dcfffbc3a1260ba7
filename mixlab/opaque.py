"""Parts of a model that compilers leave alone: for inference on a CPU our kernels are faster than what compilers write.

Compiled code calls one operator with the tensors of such a part; the operator finds the part that has them and calls
it. Graphs become a few nodes, which parts of a kind share as before.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mixlab.errors import CompileError
from mixlab.grid import Grid
from mixlab.guards import is_constant, is_exported
from mixlab.native import HAS_TAGS, OPERATOR_TAGS, VARIABLE
from mixlab.ops.linear import has_own_product

CAN_TELL = hasattr(torch.compiler, "is_exporting")  # else a graph for other programs may be in the making


class Opaque(nn.Module):
    """`part(tokens, grid) -> tokens` of the same shape. Its forward asks `as_operator` first."""

    def __new__(cls, *arguments: object, **words: object) -> "Opaque":
        part = super().__new__(cls)
        PARTS.add(part)  # copies and what is read from files as well
        return part

    def as_operator(self, tokens: Tensor, grid: Grid) -> Tensor | None:
        """self(tokens, grid) as one operator, if this is being compiled for inference where kernels do better."""
        if not torch.compiler.is_compiling() or torch.is_grad_enabled() or self.training:
            return None
        plain = tokens.device.type == "cpu" and tokens.dtype is torch.float32 and tokens.ndim == 3
        if not (plain and CAN_TELL) or is_exported() or torch.is_autocast_enabled("cpu") or not serves_compiled_code():
            return None
        tensors = tensors_of(self)
        return call_part(tokens, tensors, *grid) if tensors else None


def tensors_of(module: nn.Module) -> list[Tensor] | None:
    """Its parameters and buffers, or None if something else stands in for one (`torch.func.functional_call`, sharding).
    A compiler follows this in half of the time that it takes for the module's own iterators.
    """
    found: list[Tensor] = []
    for one in module._parameters.values():
        if one is not None:
            if type(one) is not nn.Parameter:
                return None
            found.append(one)
    found += [one for one in module._buffers.values() if one is not None]
    for child in module._modules.values():
        if child is not None:
            inner = tensors_of(child)
            if inner is None:
                return None
            found += inner
    return found


PARTS: weakref.WeakSet[Opaque] = weakref.WeakSet()


@is_constant
def serves_compiled_code() -> bool:
    return HAS_TAGS and has_own_product()


@torch.library.custom_op("mixlab::part", mutates_args=(), device_types="cpu", **OPERATOR_TAGS)
def call_part(tokens: Tensor, tensors: Sequence[Tensor], height: int, width: int, prefix: int) -> Tensor:
    out = owner_of(tensors).forward(tokens, Grid(height, width, prefix))
    return out.clone() if out is tokens else out.contiguous()


@call_part.register_fake
def _(tokens: Tensor, *others: object) -> Tensor:
    return tokens.new_empty(tokens.shape)


# -- whose tensors these are ---------------------------------------------------------------------


Slot = tuple[dict[str, Any], str]


class Known(NamedTuple):
    part: weakref.ref[Opaque]
    slots: list[Slot]

    def has(self, places: tuple[int, ...]) -> bool:
        """Whether the tensors that it has now lie in these places."""
        now: list[Any] = [own.get(name) for own, name in self.slots]
        same = len(now) == len(places) and all(type(one) in (Tensor, nn.Parameter) for one in now)  # others have none
        return same and tuple([one.data_ptr() for one in now]) == places


KNOWN: dict[tuple[int, ...], Known] = {}


def owner_of(tensors: Sequence[Tensor]) -> Any:
    """The part with these tensors. Compilers may hand on others that lie in the same place."""
    places = tuple([one.data_ptr() for one in tensors])
    known = KNOWN.get(places)
    part = None if known is None or not known.has(places) else known.part()
    return find_owner(places) if part is None else part


def slots_of(module: nn.Module) -> list[Slot]:
    """Where a part has what `tensors_of` finds, in that order."""
    found = [(own, name) for own in (module._parameters, module._buffers) for name in own if own[name] is not None]
    for child in module._modules.values():
        found += [] if child is None else slots_of(child)
    return found


def find_owner(places: tuple[int, ...]) -> Opaque:
    for part in list(PARTS):
        gone = weakref.ref(part, lambda _: KNOWN.pop(places, None))  # its slots would keep tensors alive
        known = Known(gone, slots_of(part))
        if known.has(places):
            KNOWN[places] = known
            return part
    raise CompileError(
        f"Compiled code was called with weights that belong to no layer, so that the kernels do not know what to do "
        f"with them: copies of a model's weights, or others in their place. {VARIABLE}=0 compiles without kernels."
    )
