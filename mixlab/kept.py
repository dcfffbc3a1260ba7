"""What eval mode keeps of a layer: a value that is made from parameters and used until one of them changes.

Not every change leaves a trace on a tensor (edits through `.data` do not), so the values themselves are compared.
"""

import ctypes
import ctypes.util
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from mixlab.guards import is_transformed

T = TypeVar("T")


class Entry(NamedTuple):
    key: Hashable
    sources: list[Tensor]
    value: Any


class Kept(Generic[T]):
    """One value and what it was made from. Copies of a layer and files start with nothing."""

    def __init__(self) -> None:
        self.entry: Entry | None = None

    def get(self, key: Hashable, sources: Sequence[Tensor], make: Callable[[], T]) -> T:
        """The value for this key and these sources: kept from an earlier call, or made now."""
        entry = self.entry
        if entry is None or entry.key != key or not unchanged(entry.sources, sources):
            with torch.inference_mode(False), torch.no_grad():  # what is kept may meet gradients later
                entry = Entry(key, [source.clone() for source in sources], make())
            self.entry = entry
        value: T = entry.value
        return value

    def drop(self) -> None:
        self.entry = None

    def __deepcopy__(self, memo: object) -> "Kept[T]":
        return Kept()

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, ()


class Keeper(nn.Module):
    """A layer that keeps something, which training would only make old."""

    kept: Kept[Any]

    def train(self, mode: bool = True) -> Self:
        if mode:
            self.kept.drop()
        return super().train(mode)


def may_keep(layer: nn.Module, sources: Sequence[Tensor]) -> bool:
    """In eval mode, but not while anything is learned or followed, and not of tensors without plain values."""
    if layer.training or is_transformed():
        return False
    if torch.is_grad_enabled() and any(source.requires_grad for source in sources):
        return False
    if any(source.is_cuda for source in sources) and torch.cuda.is_current_stream_capturing():
        return False  # nothing can be compared while a graph is recorded
    return all(type(source) in (Tensor, nn.Parameter) and not source.is_meta for source in sources)


def unchanged(before: Sequence[Tensor], now: Sequence[Tensor]) -> bool:
    """Whether tensors hold the same values on the same devices."""
    if len(before) != len(now) or not all(map(alike, before, now)):
        return False
    there = [(one == other).all() for one, other in zip(before, now, strict=True) if one.device.type != "cpu"]
    here = [pair for pair in zip(before, now, strict=True) if pair[0].device.type == "cpu"]
    return all(same(*pair) for pair in here) and (not there or bool(torch.stack(there).all()))  # waits once


def alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype is other.dtype and one.device == other.device and one.shape == other.shape


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors that are alike hold the same bits, on a CPU."""
    compare = compare_memory()
    if compare is None or not (one.is_contiguous() and other.is_contiguous()):
        return torch.equal(one, other)
    return one.numel() == 0 or compare(one.data_ptr(), other.data_ptr(), one.nbytes) == 0


@functools.cache
def compare_memory() -> Callable[[int, int, int], int] | None:
    """The C library's memcmp, which is a hundred times as fast as torch.equal on a CPU; None where it is not found."""
    try:
        compare = ctypes.CDLL(ctypes.util.find_library("c") or ctypes.util.find_library("msvcrt")).memcmp
    except (OSError, AttributeError, TypeError):
        return None
    compare.argtypes, compare.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_int
    found: Callable[[int, int, int], int] = compare
    return found
