"""Kernels in C for what PyTorch has no fast operator for: recurrent steps, the matrix memory, global convolutions.

They serve inference in float32 on a CPU and compute what the references in `mixlab.ops` compute. An installer builds
them where it finds a compiler of the GNU kind; without them, or with `MIXLAB_NATIVE=0`, PyTorch does the same slower.
Threads are PyTorch's own.
"""

import ctypes
import functools
import importlib.util
import os
import pathlib
import sys
from typing import Any

import torch
from torch import Tensor

from mixlab.guards import is_transformed

VARIABLE = "MIXLAB_NATIVE"  # 0: none; 4, 8 or 16: vectors of so many numbers at most


class Kernels:
    """The library, ready to be called with pointers."""

    def __init__(self, path: str, most_lanes: int, crew: object) -> None:
        self.library = ctypes.CDLL(path)
        self.library.mixlab_use_crew(crew)
        self.lanes = int(self.library.mixlab_choose(most_lanes))

    def run(self, name: str, about: ctypes.Structure) -> None:
        if getattr(self.library, f"mixlab_{name}")(ctypes.byref(about)):
            raise MemoryError(f"no memory for what {name} needs beside its input and output")


@functools.cache
def kernels() -> Kernels | None:
    """The kernels, or None where there are none."""
    wanted = os.environ.get(VARIABLE, "16")
    spec, crew = importlib.util.find_spec("mixlab.native._kernels"), thread_starter()
    if not wanted.isdecimal() or int(wanted) == 0 or spec is None or spec.origin is None or crew is None:
        return None
    try:
        return Kernels(spec.origin, int(wanted), crew)
    except OSError:  # built for another machine
        return None


def thread_starter() -> object | None:
    """The function of PyTorch's own OpenMP library that starts a team of threads; None where it is another kind."""
    if sys.platform != "linux":
        return None
    mapped = pathlib.Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in mapped if "omp" in line.rpartition("/")[2]}
    for path in sorted(paths):
        try:
            return ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
    return None


def may_run(*tensors: Tensor | None) -> bool:
    """Whether the kernels are there and these are plain float32 numbers of a CPU that nothing follows."""
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors):
        return False
    if is_transformed() or torch.is_autocast_enabled("cpu") or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all(one is None or is_plain(one) for one in tensors) and kernels() is not None


def is_plain(x: Tensor) -> bool:
    plain = type(x) in (Tensor, torch.nn.Parameter) and x.dtype is torch.float32 and x.device.type == "cpu"
    return plain and x.layout is torch.strided and x.numel() > 0


def pointer(x: Tensor | None) -> int | None:
    return None if x is None or x.is_meta else x.data_ptr()


def structure(name: str, **fields: Any) -> type[ctypes.Structure]:
    """The mirror of one of kernels.h: pointers unless it says otherwise."""
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})
