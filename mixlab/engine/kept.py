"""What eval mode keeps of a layer: a value that is made from parameters and used until one of them changes.

Not every change leaves a trace on a tensor (edits through `.data` do not), so the values themselves are compared.
"""

import ctypes
import ctypes.util
import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from mixlab.core.guards import is_transformed
from mixlab.engine.kernels import kernels

T = TypeVar("T")


class Entry(NamedTuple):
    key: Hashable
    sources: "Watched"
    value: Any


class Kept(Generic[T]):
    """One value and what it was made from. Copies of a layer and files start with nothing."""

    def __init__(self) -> None:
        self.entry: Entry | None = None

    def get(self, key: Hashable, sources: Sequence[Tensor], make: Callable[[], T]) -> T:
        """The value for this key and these sources: kept from an earlier call, or made now."""
        entry = self.entry
        known = entry is not None and entry.key == key
        if entry is None or not (known and entry.sources.are_as_they_were(sources)):
            same = entry is not None and known and unchanged(entry.sources.copies, sources)
            if entry is None or not same or entry.sources.places is not None:  # else where they lie is not watched
                with torch.inference_mode(False), torch.no_grad():  # what is kept may meet gradients later
                    entry = Entry(key, Watched(sources), entry.value if entry is not None and same else make())
                self.entry = entry
        value: T = entry.value
        return value

    def recall(self, key: Hashable, sources: Sequence[Tensor]) -> T | None:
        """The value that was kept under this key, if these very tensors are as they were."""
        entry = self.entry
        known = entry is not None and entry.key == key and entry.sources.are_as_they_were(sources)
        return entry.value if entry is not None and known else None

    def watch(self, value: T) -> Callable[[], bool] | None:
        """A question for whoever sees to it that the sources of this value stay the tensors that they are, where they
        are: whether they hold what they hold now. None if the value is not kept.
        """
        entry = self.entry
        memory = None if entry is None or entry.value is not value else entry.sources.memory
        return None if memory is None else lambda: self.entry is entry and memory.is_same()

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


class Watched:
    """Tensors and a copy of their values."""

    def __init__(self, sources: Sequence[Tensor]) -> None:
        self.copies = [source.clone() for source in sources]
        plain = all(source.device.type == "cpu" and source.is_contiguous() for source in sources)
        plain = plain and torch._C._len_torch_dispatch_stack() == 0  # else the copies may be without memory
        self.places = [Place(one) for one in sources] if plain else None
        self.memory = Memory(sources, self.copies) if plain else None

    def are_as_they_were(self, sources: Sequence[Tensor]) -> bool:
        """Whether these are the very tensors, in the same place, with the same values: a tenth of the time that it
        takes to compare others.
        """
        if self.places is None or self.memory is None or len(sources) != len(self.places):
            return False
        if not all(place.holds(source) for place, source in zip(self.places, sources, strict=True)):
            return False
        return self.memory.is_same()


class Place:
    """Where a tensor lies, without keeping it alive."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.pointer = weakref.ref(tensor), tensor.data_ptr()
        self.dtype, self.shape, self.stride = tensor.dtype, tensor.shape, tensor.stride()

    def holds(self, tensor: Tensor) -> bool:
        same = tensor is self.tensor() and tensor.data_ptr() == self.pointer and tensor.dtype is self.dtype
        return same and tensor.shape == self.shape and tensor.stride() == self.stride


class Memory:
    """Pieces of memory and their copies, which one call compares."""

    def __init__(self, now: Sequence[Tensor], before: Sequence[Tensor]) -> None:
        pairs = [(one, other) for one, other in zip(now, before, strict=True) if one.nbytes]
        count = len(pairs)
        self.pairs = [(one.data_ptr(), other.data_ptr(), one.nbytes) for one, other in pairs]
        self.now = (ctypes.c_void_p * count)(*(pair[0] for pair in self.pairs))
        self.before = (ctypes.c_void_p * count)(*(pair[1] for pair in self.pairs))
        self.sizes = (ctypes.c_size_t * count)(*(pair[2] for pair in self.pairs))

    def is_same(self) -> bool:
        found = kernels()
        if found is not None:
            return found.are_same(self.now, self.before, self.sizes, len(self.pairs))
        compare = compare_memory()
        return compare is not None and all(compare(*pair) == 0 for pair in self.pairs)


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
