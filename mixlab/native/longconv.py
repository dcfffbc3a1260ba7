"""Long convolutions by the Fourier transform with channels side by side: `mixlab.ops.longconv` has the references."""

import ctypes
import functools
import math
from ctypes import c_int, c_ssize_t, c_void_p

import torch
import torch.nn.functional as F
from torch import Tensor

from mixlab.native import kernels, pointer


class LongConvAbout(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "spectrum", "factor", "out")),
        ("factor_row", c_ssize_t),
        *((name, c_int) for name in ("images", "height", "width", "channels", "rows", "columns")),
        ("row_turns", c_void_p),
        ("column_turns", c_void_p),
        ("threads", c_int),
    )


def pack_spectrum(spectrum: Tensor) -> Tensor:
    """The kernel's transform (rows, half of the columns, C), centre at place 0, divided by the number of places.

    Channels come in blocks of two vectors a and b, of which the kernel needs half the sum and half the difference:
    (blocks, half, rows, 4, lanes).
    """
    found = kernels()
    assert found is not None
    padding = -spectrum.shape[-1] % (2 * found.lanes)
    parts = F.pad(torch.view_as_real(spectrum), (0, 0, 0, padding)).unflatten(2, (-1, 2, found.lanes))
    one, other = parts.permute(2, 1, 0, 3, 5, 4).unbind(3)  # each (blocks, half, rows, 2, lanes)
    return torch.stack([(one + other) / 2, (one - other) / 2], 3).flatten(3, 4)


def convolve_maps(x: Tensor, spectrum: Tensor, columns: int, factor: Tensor | None = None) -> Tensor:
    """(B, H, W, C), convolved and multiplied with a factor of that shape, whose last axis is contiguous."""
    found, (images, height, width, channels) = kernels(), x.shape
    assert found is not None
    rows, out = spectrum.shape[2], torch.empty_like(x)
    sizes = (images, height, width, channels, rows, columns)
    turns = (turns_of(rows).data_ptr(), turns_of(columns).data_ptr(), torch.get_num_threads())
    row = 0 if factor is None else factor.stride(1) // width
    found.run(
        "longconv", LongConvAbout(pointer(x), pointer(spectrum), pointer(factor), pointer(out), row, *sizes, *turns)
    )
    return out


@functools.cache
def turns_of(steps: int) -> Tensor:
    """Cosine and sine of a circle in so many steps, (steps, 2)."""
    with torch.inference_mode(False):
        angles = torch.arange(steps, dtype=torch.float64) * (2 * math.pi / steps)
        return torch.stack([angles.cos(), angles.sin()], 1).float()
