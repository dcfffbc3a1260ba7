"""The one cache of the engine: plans of models, and values that are made from parameters."""

import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from torch import nn

ATTRIBUTE = "_engine_cache"  # of modules


class Entry(NamedTuple):
    """A value and the question whether it still holds."""

    value: Any
    holds: Callable[[], bool]


class Cache:
    """Values by the module that they belong to, and by a key. The contract, for all of them:

    An entry is used only after its `holds` said yes, in the very call that uses it. It says yes while

    - every module that the value was made from is of the same class, with the same attributes, children, parameters and
      buffers, nobody listens to it, and nothing stands in for its forward;
    - every parameter and buffer is the same tensor in the same memory, read with the same strides and dtype;
    - what was copied into the value (filters, packed gates, single numbers) is compared with the numbers of now. What
      the value only points at may change its numbers at any time: it is read where it lies.

    So edits in place, also through `.data`, other tensors, `load_state_dict` with and without `assign`, other devices
    and dtypes are all seen at the next call. Models that `freeze` was called for are the exception: nothing is asked.

    Entries belong to one object: copies of a module and files begin with none, and an entry dies with its module. A
    module that is seen in training mode loses its entries. Threads may use the cache at once: the worst that happens is
    that two make the same value.
    """

    def find(self, owner: nn.Module, key: Hashable) -> Any:
        """The value under this key if it holds, else None."""
        box = box_of(owner)
        entry = None if box is None else box.entries.get(key)
        if box is None or entry is None:
            return None
        if not entry.holds():
            self.sweep(owner)
            return None
        entries = box.entries
        if next(reversed(entries)) != key:  # used last: to the end
            box.entries = {**{other: one for other, one in entries.items() if other != key}, key: entry}
        return entry.value

    def keep(self, owner: nn.Module, key: Hashable, entry: Entry, most: int) -> None:
        """Keep a value, and of all with keys whose first entry is this key's no more than the last `most`."""
        box = box_of(owner)
        if box is None:
            box = vars(owner)[ATTRIBUTE] = Box(owner)
        others = {other: one for other, one in box.entries.items() if other != key}
        alike = [other for other in others if first(other) == first(key)]
        for other in alike[: max(0, len(alike) - most + 1)]:
            del others[other]
        box.entries = {**others, key: entry}  # at once: other threads may be reading

    def sweep(self, owner: nn.Module) -> None:
        """Drop what does not hold, which would keep alive what nobody uses."""
        box = box_of(owner)
        if box is not None:
            box.entries = {key: entry for key, entry in box.entries.items() if entry.holds()}

    def entries(self, owner: nn.Module) -> dict[Hashable, Entry]:
        """All that is kept for a module."""
        box = box_of(owner)
        return {} if box is None else dict(box.entries)

    def drop(self, owner: nn.Module) -> None:
        """Forget what belongs to a module."""
        box = box_of(owner)
        if box is not None:
            box.entries = {}


class Box:
    """The entries of one module, which lie among its attributes, so that they die with it. Copies and files of the
    module get an empty one; so does a shallow copy, which shares its attributes.
    """

    def __init__(self, owner: nn.Module | None = None) -> None:
        self.owner = None if owner is None else weakref.ref(owner)
        self.entries: dict[Hashable, Entry] = {}

    def __deepcopy__(self, memo: object) -> "Box":
        return Box()

    def __reduce__(self) -> tuple[Any, ...]:
        return Box, ()


def box_of(owner: nn.Module) -> Box | None:
    """The box of this very module."""
    box: Box | None = vars(owner).get(ATTRIBUTE)
    return box if box is not None and box.owner is not None and box.owner() is owner else None


def first(key: Hashable) -> Hashable:
    return key[0] if isinstance(key, tuple) else key


CACHE = Cache()
