"""Kernels in C for what PyTorch has no fast operator for: recurrent steps, the matrix memory, global convolutions.

They serve inference in float32 on a CPU, some of them training, and compute what the references in `mixlab.ops`
compute. An installer builds them where it finds a compiler of the GNU kind; without them, or with `MIXLAB_NATIVE=0`,
PyTorch does the same slower. Threads are the library's own, as many as PyTorch is told to use.
"""

import ctypes
import functools
import importlib.util
import inspect
import os
import sys
import warnings
from typing import Any

import torch
from torch import Tensor

from mixlab.core.guards import is_constant, is_transformed
from mixlab.engine.kernels.processors import allowed_processors

NAMES = (
    *("steps", "same", "linear", "mlp", "lstm", "mlstm", "longconv", "norm", "depthwise", "taps", "star", "factor"),
    *("factor_gradient", "attention", "attention_gradient", "resample", "heads", "blocks"),
    *("pool", "whole_norm", "weight", "limit_threads", "count_workers"),
)
# Of operators that compiled code calls. Without the tag inductor fails on a second image size; PyTorch releases that do
# not know it call none.
HAS_TAGS = "tags" in inspect.signature(torch.library.custom_op).parameters
OPERATOR_TAGS: dict[str, Any] = {"tags": (torch.Tag.flexible_layout,)} if HAS_TAGS else {}
WIDE = 8
VARIABLE = "MIXLAB_NATIVE"  # 0: none; 4, 8 or 16: vectors of so many numbers at most


class Kernels:
    """The library, ready to be called with pointers."""

    def __init__(self, path: str, most_lanes: int) -> None:
        self.library = ctypes.CDLL(path)
        if not all(hasattr(self.library, f"mixlab_{name}") for name in NAMES):
            warnings.warn(f"{path} was built from older sources and is not used: install Mixlab again.", stacklevel=2)
            raise AttributeError(f"{path} lacks kernels")
        self.library.mixlab_limit_threads(allowed_processors())
        self.lanes = int(self.library.mixlab_choose(most_lanes))
        self.compare, self.steps = self.library.mixlab_same, self.library.mixlab_steps

    def are_same(self, now: object, before: object, sizes: object, count: int) -> bool:
        """Whether pieces of memory of so many bytes hold the same: arrays of their addresses and sizes."""
        return bool(self.compare(now, before, sizes, count, torch.get_num_threads()))

    def run(self, name: str, about: ctypes.Structure) -> None:
        if getattr(self.library, f"mixlab_{name}")(ctypes.byref(about), ctypes.sizeof(about)):
            raise failure(name)

    def run_steps(self, text: bytearray) -> None:
        """What `mixlab.engine.kernels.steps` writes down."""
        size = len(text)
        if self.steps((ctypes.c_char * size).from_buffer(text), ctypes.c_size_t(size)):
            raise failure("steps")


def failure(name: str) -> RuntimeError:
    return RuntimeError(
        f"The kernel {name} found no memory for what it needs beside its input and output, or was built from "
        f"other sources than these: then install Mixlab again, or set {VARIABLE}=0."
    )


@functools.cache
def kernels() -> Kernels | None:
    """The kernels, or None where there are none."""
    wanted = os.environ.get(VARIABLE, "16")
    if not wanted.isdecimal() or int(wanted) == 0 or sys.platform != "linux":
        return None
    spec = importlib.util.find_spec("mixlab.engine.kernels._kernels")
    if spec is None or spec.origin is None:
        return None
    try:
        return Kernels(spec.origin, int(wanted))
    except (OSError, AttributeError):  # built for another machine or from older sources
        return None


@is_constant
def has_kernels() -> bool:
    """The same for code that is being compiled."""
    return kernels() is not None


def has_wide_vectors() -> bool:
    """Whether there are kernels with vectors of 8 numbers or more, where they were measured beside other libraries."""
    found = kernels()
    return found is not None and found.lanes >= WIDE


def may_run(*tensors: Tensor | None) -> bool:
    """Whether the kernels are there and these are plain float32 numbers of a CPU that nothing follows."""
    if is_transformed() or torch.is_autocast_enabled("cpu") or torch._C._len_torch_dispatch_stack() > 0:
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
    return type(x) is torch.nn.Parameter or (type(x) is Tensor and not torch._C._functorch.is_legacy_batchedtensor(x))


def pointer(x: Tensor | None) -> int | None:
    return None if x is None or x.is_meta else x.data_ptr()
