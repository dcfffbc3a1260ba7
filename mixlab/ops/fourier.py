"""Matrices of the Fourier transform and its inverse over real numbers.

A complex axis is stored as real parts, then imaginary parts: an axis of 2 in front or behind.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from mixlab.core.compat import without_modes
from mixlab.core.guards import is_exported

CONSTANTS = 128  # matrices that are kept


def constant(make: Callable[..., Tensor], *sizes: int, like: Tensor) -> Tensor:
    """A matrix of the transform, made once; compiled code makes it at every call, from tables at next to no cost, and
    so do tensors that are no plain ones. A graph that is exported holds it as a constant.
    """
    if (torch.compiler.is_compiling() or type(like) is not Tensor) and not is_exported():
        return make(*sizes, like.device).to(like.dtype)
    return kept_constant(make, sizes, like.dtype, like.device)


@functools.lru_cache(CONSTANTS)
def kept_constant(
    make: Callable[..., Tensor], sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    # a real tensor that gradients may meet, whatever is being traced or switched off around the first call
    with without_modes(), torch.inference_mode(False), torch.no_grad():
        return make(*sizes, device).to(dtype)


def waves(frequencies: int, size: int, period: int, first: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of 2 pi k j / n for frequencies k from 0 and places j from `first`, in double precision."""
    k = torch.arange(frequencies, device=device)[:, None]
    turn = k * torch.arange(first, first + size, device=device) % period
    table = torch.arange(period, device=device).to(wide(device)) * (2 * math.pi / period)
    return table.cos()[turn], table.sin()[turn]


def wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def forward(size: int, period: int, first: int, device: torch.device) -> Tensor:
    """Complex to complex: rows (2, n), columns (size, 2)."""
    cos, sin = waves(period, size, period, first, device)
    return torch.cat([torch.stack([cos, sin], 2).flatten(1), torch.stack([-sin, cos], 2).flatten(1)])


def inverse(size: int, period: int, device: torch.device) -> Tensor:
    """Its inverse at places 0 to size - 1: rows (size, 2), columns (2, n)."""
    return (forward(size, period, 0, device).T / period).contiguous()


def forward_half(size: int, period: int, first: int, device: torch.device) -> Tensor:
    """Real to the first half of the spectrum: rows (2, halves), columns (size)."""
    cos, sin = waves(period // 2 + 1, size, period, first, device)
    return torch.cat([cos, -sin])


def inverse_half(size: int, period: int, device: torch.device) -> Tensor:
    """Its inverse: rows (size), columns (2, halves). A frequency stands for its mirror image too, if it has one."""
    k = torch.arange(period // 2 + 1, device=device)
    counts = torch.where((k == 0) | (2 * k == period), 1, 2).repeat(2)[:, None]
    return (forward_half(size, period, 0, device) * counts).T.contiguous() / period
