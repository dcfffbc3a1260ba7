"""Values that are made from parameters: filters, packed gates, resampled tables. Eval mode keeps them."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from mixlab.core.compat import HOOKS
from mixlab.core.guards import is_transformed
from mixlab.engine.cache import CACHE, Entry, first
from mixlab.engine.watch import Sources

T = TypeVar("T")


class Derived(NamedTuple):
    """A value, the whole key that it was made for, and what it was made from."""

    key: Hashable
    value: Any
    sources: Sources


def derived(
    owner: nn.Module, key: Hashable, sources: Sequence[Tensor], make: Callable[[], T], *, cheap: bool = False
) -> T:
    """What `mixlab.core.hooks.derived` asks for: one value per name and module is kept."""
    waits = cheap and any(source.device.type != "cpu" for source in sources)
    if waits or not may_keep(owner, sources):
        if owner.training:
            CACHE.drop(owner)
        return make()
    return derive(owner, key, sources, make)[0]


def derive(
    owner: nn.Module, key: Hashable, sources: Sequence[Tensor], make: Callable[[], T]
) -> tuple[T, Sequence[Tensor]]:
    """The value, and the copies of its sources that are kept beside it."""
    name = (("derived", first(key)),)
    entry = CACHE.entries(owner).get(name)
    kept: Derived | None = None if entry is None else entry.value
    if kept is None or kept.key != key or not kept.sources.are(sources):
        same = kept is not None and kept.key == key and kept.sources.equal(sources)
        if kept is None or not same or kept.sources.places is not None:  # else where they lie is not watched
            with torch.inference_mode(False), torch.no_grad():  # what is kept may meet gradients later
                value = kept.value if kept is not None and same else make()
                kept = Derived(key, value, Sources(sources))
            CACHE.keep(owner, name, Entry(kept, kept.sources.live), 1)
    return kept.value, kept.sources.copies


def may_keep(owner: nn.Module, sources: Sequence[Tensor]) -> bool:
    """In eval mode, but not while anything is learned or followed, not of tensors without plain values, and not while
    somebody listens to what the value is made by.
    """
    if owner.training or is_transformed():
        return False
    if torch.is_grad_enabled() and any(source.requires_grad for source in sources):
        return False
    if any(source.is_cuda for source in sources) and torch.cuda.is_current_stream_capturing():
        return False  # nothing can be compared while a graph is recorded
    if not all(type(source) in (Tensor, nn.Parameter) and not source.is_meta for source in sources):
        return False
    return not any(vars(module)[hooks] for module in owner.modules() if module is not owner for hooks in HOOKS)
