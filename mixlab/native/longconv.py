"""Long convolutions by the Fourier transform with channels side by side: `mixlab.ops.longconv` has the references."""

import ctypes
import functools
import math
from ctypes import c_int, c_ssize_t, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from mixlab.native import kernels, pointer


class LongConvAbout(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "taps", "spectrum", "factor", "out")),
        ("factor_row", c_ssize_t),
        *((name, c_int) for name in ("images", "height", "width", "channels", "rows", "columns")),
        *((name, c_int) for name in ("high", "wide", "above", "before")),
        ("row_turns", c_void_p),
        ("column_turns", c_void_p),
        ("threads", c_int),
    )


class Kernel(NamedTuple):
    """Taps (high, wide, C) for maps on a circle of so many rows and columns; taps above and before the one that meets
    its own place.
    """

    taps: Tensor
    rows: int
    columns: int
    above: int
    before: int

    def about(self, **given: int | None) -> LongConvAbout:
        high, wide, channels = self.taps.shape
        return LongConvAbout(
            taps=pointer(self.taps),
            channels=channels,
            rows=self.rows,
            columns=self.columns,
            high=high,
            wide=wide,
            above=self.above,
            before=self.before,
            row_turns=turns_of(self.rows).data_ptr(),
            column_turns=turns_of(self.columns).data_ptr(),
            threads=torch.get_num_threads(),
            **given,
        )


def spectrum_size(channels: int, rows: int, columns: int) -> int:
    """Numbers in the spectrum of a kernel."""
    found = kernels()
    assert found is not None
    block = 2 * found.lanes
    return -(-channels // block) * block * (2 * (columns // 2 + 1) * rows + 1)


def make_spectrum(kernel: Kernel) -> Tensor:
    """The kernel's transform as the convolution reads it, for many calls."""
    found = kernels()
    assert found is not None
    spectrum = kernel.taps.new_empty(spectrum_size(kernel.taps.shape[2], kernel.rows, kernel.columns))
    found.run("longconv", kernel.about(spectrum=pointer(spectrum)))
    return spectrum


def convolve_maps(x: Tensor, kernel: Kernel, spectrum: Tensor | None, factor: Tensor | None = None) -> Tensor:
    """(B, H, W, C), convolved and multiplied with a factor of that shape, whose last axis is contiguous.

    Without a spectrum the kernel's is made block by block and thrown away.
    """
    found, (images, height, width, _) = kernels(), x.shape
    assert found is not None
    out = x.new_empty(x.shape)
    factor = None if factor is None else with_rows(factor)
    row = 0 if factor is None else row_of(factor)
    pointers = {"x": pointer(x), "spectrum": pointer(spectrum), "factor": pointer(factor), "out": pointer(out)}
    found.run("longconv", kernel.about(**pointers, factor_row=row, images=images, height=height, width=width))
    return out


def row_of(x: Tensor) -> int:
    """Numbers from a pixel of (B, H, W, C) to the next; an axis of one place has any stride."""
    return next((x.stride(axis) for axis in (2, 1, 0) if x.shape[axis] > 1), x.shape[3])


def with_rows(x: Tensor) -> Tensor:
    """(B, H, W, C) whose pixels lie at equal distances: as it is, or a copy."""
    row, (_, height, width, _) = row_of(x), x.shape
    strides = zip(x.shape, x.stride(), (height * width * row, width * row, row, 1), strict=True)
    return x if all(size == 1 or stride == wanted for size, stride, wanted in strides) else x.contiguous()


@functools.cache
def turns_of(steps: int) -> Tensor:
    """Cosine and sine of a circle in so many steps, (steps, 2)."""
    with torch.inference_mode(False):
        angles = torch.arange(steps, dtype=torch.float64, device="cpu") * (2 * math.pi / steps)
        return torch.stack([angles.cos(), angles.sin()], 1).float()
