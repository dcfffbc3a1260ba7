"""Long convolutions along one axis in real arithmetic: each Fourier transform is two products with small matrices.

A circle of n = a * b places is laid out as a rows of b. With place j = b * r + c and frequency k = s + a * t,

    exp(-2 pi i j k / n) = exp(-2 pi i r s / a) * exp(-2 pi i c s / n) * exp(-2 pi i c t / b)

so the transform goes down the columns, turns every entry by an angle of its own, and goes along the rows. It costs
a + b products per place instead of n. Inputs are real, so half of the frequencies s are enough: the others mirror them.
"""

import math

import torch
from torch import Tensor

from mixlab.ops.fourier import constant, forward, forward_half, inverse, inverse_half, wide
from mixlab.ops.longconv import Span, left_product


def layout(span: Span) -> tuple[int, int]:
    """Rows and columns of the cheapest circle on which what wraps around falls outside."""

    def cost(columns: int) -> int:
        halves = -(-span.period // columns) // 2 + 1
        down = 2 * halves * columns * -(-span.size // columns)
        return down + halves * (2 * columns) ** 2

    columns = min(range(1, span.period + 1), key=cost)
    return -(-span.period // columns), columns


def prepare_two_steps(kernel: Tensor, span: Span) -> Tensor:
    """The spectrum (halves, 2, b, C) of a kernel (K, C) whose centre is at place 0: real parts, then imaginary ones."""
    rows, columns = layout(span)
    taps = kernel.new_zeros(rows * columns, kernel.shape[1], dtype=wide(kernel.device))
    taps[: span.taps] = kernel
    spectrum = torch.fft.fft(taps.roll(-span.future, 0), dim=0)  # by frequency s + a * t
    spectrum = spectrum.unflatten(0, (columns, rows)).transpose(0, 1)[: rows // 2 + 1]  # (halves, b, C)
    return torch.stack([spectrum.real, spectrum.imag], 1).to(kernel.dtype)


def convolve_two_steps(x: Tensor, kernel: Tensor, span: Span) -> Tensor:
    """The convolution of (B, L, C) with a prepared kernel."""
    rows, columns = layout(span)
    batch, size, channels = x.shape
    filled, halves = -(-size // columns), rows // 2 + 1
    padded = torch.nn.functional.pad(x, (0, 0, 0, filled * columns - size))
    there = constant(forward_half, filled, rows, 0, like=x)  # (2 halves, filled)
    down = left_product(there, padded.reshape(batch, filled, columns * channels))
    real, imaginary = down.view(batch, 2, halves, columns, channels).unbind(1)  # each (B, halves, b, C)
    cos, sin = constant(turns, rows, columns, like=x).unbind(0)  # each (halves, b, 1)
    turned = torch.stack([real * cos + imaginary * sin, imaginary * cos - real * sin], 3)  # (B, halves, b, 2, C)
    there = constant(forward, columns, columns, 0, like=x)  # (2b, 2b)
    along = left_product(there, turned.view(batch * halves, 2 * columns, channels))
    real, imaginary = along.view(batch, halves, 2, columns, channels).unbind(2)
    of_real, of_imaginary = kernel.unbind(1)
    product = [real * of_real - imaginary * of_imaginary, real * of_imaginary + imaginary * of_real]
    back = constant(inverse, columns, columns, like=x)  # (2b, 2b)
    along = left_product(back, torch.stack(product, 2).view(batch * halves, 2 * columns, channels))
    real, imaginary = along.view(batch, halves, columns, 2, channels).unbind(3)
    turned = torch.stack([real * cos - imaginary * sin, imaginary * cos + real * sin], 1)  # (B, 2, halves, b, C)
    back = constant(inverse_half, filled, rows, like=x)  # (filled, 2 halves)
    out = left_product(back, turned.view(batch, 2 * halves, columns * channels))
    return out.view(batch, filled * columns, channels)[:, :size]


def turns(rows: int, columns: int, device: torch.device) -> Tensor:
    """cos and sin of 2 pi c s / n, (2, halves, b, 1)."""
    turn = torch.arange(rows // 2 + 1, device=device)[:, None] * torch.arange(columns, device=device)
    angle = turn.to(wide(device)) * (2 * math.pi / (rows * columns))
    return torch.stack([angle.cos(), angle.sin()])[..., None]
