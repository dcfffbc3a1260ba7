"""Long convolutions by the Fourier transform with channels side by side: `mixlab.ops.longconv` has the references."""

import ctypes
import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from mixlab.engine.kernels import kernels, pointer, structure

LongConvAbout = structure("longconv")


class Kernel(NamedTuple):
    """Taps (high, wide, C) for maps on a circle of so many rows and columns; taps above and before the one that meets
    its own place.
    """

    high: int
    wide: int
    channels: int
    rows: int
    columns: int
    above: int
    before: int

    def about(self, **given: int | None) -> ctypes.Structure:
        turns = turns_of(self.rows).data_ptr(), turns_of(self.columns).data_ptr()
        threads = torch.get_num_threads()
        return LongConvAbout(**self._asdict(), row_turns=turns[0], column_turns=turns[1], threads=threads, **given)


def spectrum_size(kernel: Kernel) -> int:
    """Numbers in the spectrum of a kernel."""
    found = kernels()
    assert found is not None
    block = 2 * found.lanes
    return -(-kernel.channels // block) * block * (2 * (kernel.columns // 2 + 1) * kernel.rows + 1)


def make_spectrum(kernel: Kernel, taps: Tensor) -> Tensor:
    """The kernel's transform as the convolution reads it, for many calls."""
    found = kernels()
    assert found is not None
    spectrum = taps.new_empty(spectrum_size(kernel))
    found.run("longconv", kernel.about(taps=pointer(taps), spectrum=pointer(spectrum)))
    return spectrum


def convolve_maps(
    x: Tensor, kernel: Kernel, *, taps: Tensor | None = None, spectrum: Tensor | None = None, factor: Tensor | None
) -> Tensor:
    """(B, H, W, C), convolved and multiplied with a factor of that shape, whose last axis is contiguous.

    Without a spectrum the kernel's is made from the taps block by block and thrown away.
    """
    found, (images, height, width, _) = kernels(), x.shape
    assert found is not None
    out = x.new_empty(x.shape)
    factor = None if factor is None else with_rows(factor)
    about = kernel.about(
        x=pointer(x),
        taps=pointer(taps),
        spectrum=pointer(spectrum),
        factor=pointer(factor),
        out=pointer(out),
        factor_row=0 if factor is None else row_of(factor),
        images=images,
        height=height,
        width=width,
    )
    found.run("longconv", about)
    return out


def row_of(x: Tensor) -> int:
    """Numbers from a pixel of (B, H, W, C) to the next; an axis of one place has any stride."""
    return next((x.stride(axis) for axis in (2, 1, 0) if x.shape[axis] > 1), x.shape[3])


def with_rows(x: Tensor) -> Tensor:
    """(B, H, W, C) whose pixels lie at equal distances: as it is, or a copy."""
    row, (_, height, width, _), strides = row_of(x), x.shape, x.stride()
    wanted = (height * width * row, width * row, row, 1)
    if strides == wanted:
        return x
    sizes = zip(x.shape, strides, wanted, strict=True)
    return x if all(size == 1 or stride == needed for size, stride, needed in sizes) else x.contiguous()


@functools.cache
def turns_of(steps: int) -> Tensor:
    """Cosine and sine of a circle in so many steps, (steps, 2)."""
    with torch.inference_mode(False):
        angles = torch.arange(steps, dtype=torch.float64, device="cpu") * (2 * math.pi / steps)
        return torch.stack([angles.cos(), angles.sin()], 1).float()
