"""How much memory a computation on tensors without data would take."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakCounter(TorchDispatchMode):
    """`peak`: the most bytes that outputs of operators under it hold at once. Views hold nothing of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:  # neither a view nor written in place
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return out


def tensors_in(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
