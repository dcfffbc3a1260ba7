"""Kernels in C for what PyTorch has no fast operator for: recurrent steps, the matrix memory, global convolutions.

They serve inference in float32 on a CPU, some of them training, and compute what the references in `mixlab.ops`
compute. An installer builds them where it finds a compiler of the GNU kind; without them, or with `MIXLAB_NATIVE=0`,
PyTorch does the same slower. Threads are the library's own, as many as PyTorch is told to use.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from mixlab.core.compat import has_modes, is_batched
from mixlab.core.guards import is_constant, is_transformed
from mixlab.engine.kernels.library import (
    VARIABLE,
    Kernels,
    activation_number,
    constant,
    kernel_number,
    kernels,
    reason_without_kernels,
    structure,
)

__all__ = [
    "HAS_TAGS",
    "OPERATOR_TAGS",
    "VARIABLE",
    "Kernels",
    "activation_number",
    "constant",
    "has_kernels",
    "has_wide_vectors",
    "is_plain",
    "kernel_number",
    "kernels",
    "may_run",
    "pointer",
    "reason_without_kernels",
    "structure",
]
# Of operators that compiled code calls. Without the tag inductor fails on a second image size; PyTorch releases that do
# not know it call none.
HAS_TAGS = "tags" in inspect.signature(torch.library.custom_op).parameters
OPERATOR_TAGS: dict[str, Any] = {"tags": (torch.Tag.flexible_layout,)} if HAS_TAGS else {}
WIDE = 8


@is_constant
def has_kernels() -> bool:
    """Whether there are kernels, for code that is being compiled."""
    return kernels() is not None


def has_wide_vectors() -> bool:
    """Whether there are kernels with vectors of 8 numbers or more, where they were measured beside other libraries."""
    found = kernels()
    return found is not None and found.lanes >= WIDE


def may_run(*tensors: Tensor | None) -> bool:
    """Whether the kernels are there and these are plain float32 numbers of a CPU that nothing follows."""
    if is_transformed() or torch.is_autocast_enabled("cpu") or has_modes():
        return False
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors):
        return False
    for one in tensors:
        if one is not None and not is_plain(one):
            return False
    return kernels() is not None


def is_plain(x: Tensor) -> bool:
    """Asked in front of every kernel, outside of compiled code: the cheapest question first."""
    if x.dtype is not torch.float32 or not x.is_cpu or x.layout is not torch.strided or x.numel() == 0 or x.is_neg():
        return False
    return type(x) is torch.nn.Parameter or (type(x) is Tensor and not is_batched(x))


def pointer(x: Tensor | None) -> int | None:
    return None if x is None or x.is_meta else x.data_ptr()
