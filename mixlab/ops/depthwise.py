"""Depthwise convolutions over channels-last maps whose kernels are learned.

A CPU's library has a fast kernel gradient for kernels of up to three columns only; wider ones go through dense products
of 16 x 16 channels, of which 15/16 are thrown away. Wide kernels are therefore cut into strips of three columns, and
kernels of one row are laid down as a column. The convolution itself, also of a gradient, and the kernel gradient are
our own kernels' where these are faster.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mixlab.core.guards import is_transformed, without_autocast
from mixlab.engine.kernels import has_wide_vectors, may_run
from mixlab.engine.kernels.depthwise import convolve_channels, fits, taps_gradient

WIDTHS = (5, 7)  # columns of a kernel that our own convolution is for
STRIP = 3  # columns of a kernel whose gradient is fast
Pair = tuple[int, int]  # rows, columns


def depthwise(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Pair) -> Tensor:
    """(B, C, H, W) with kernels (C, 1, h, w): `F.conv2d` with a faster kernel gradient."""
    if not gradient_is_slow(x, weight, padding):
        return convolved(x, weight, bias, padding)
    output: Tensor = Depthwise.apply(x, weight, bias, padding)
    return output


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Pair) -> Tensor:
    """The convolution alone."""
    if runs_natively(x, weight, bias, padding):
        return convolve_channels(x.permute(0, 2, 3, 1), weight, bias, padding).permute(0, 3, 1, 2)
    return F.conv2d(x, weight, bias, padding=padding, groups=len(weight))


def runs_natively(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Pair) -> bool:
    """Where the kernel is faster than the library's: it has been measured for these widths, and vectors of 8 and 16."""
    centred = all(size == 2 * around + 1 for size, around in zip(weight.shape[2:], padding, strict=True))
    if not (x.ndim == 4 and centred and weight.shape[2] > 1 and weight.shape[3] in WIDTHS and may_run(x, weight, bias)):
        return False
    return has_wide_vectors() and fits(x.permute(0, 2, 3, 1), weight, bias)


def channels_last(x: Tensor) -> Tensor:
    """(B, H, W, C) of (B, C, H, W), with the channels of a pixel side by side."""
    x = x.permute(0, 2, 3, 1)
    return x if x.stride(3) == 1 else x.contiguous()


def gradient_is_slow(x: Tensor, weight: Tensor, padding: Pair) -> bool:
    if is_transformed() or not (torch.is_grad_enabled() and weight.requires_grad):
        return False
    if any(around >= size for around, size in zip(padding, weight.shape[2:], strict=True)):  # more than a kernel sees
        return False
    plain = x.device.type == "cpu" and x.dtype is weight.dtype is torch.float32
    return plain and not torch.is_autocast_enabled("cpu") and weight.shape[3] > STRIP


class Depthwise(torch.autograd.Function):
    """The convolution itself; its gradients can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: Pair) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.padding = padding
        return convolved(x, weight, bias, padding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wanted, (height, width) = ctx.needs_input_grad, weight.shape[2:]
        to_x, to_weight = None, None
        with without_autocast(x):
            if wanted[0]:  # the same convolution with the kernel turned round
                around = (height - 1 - ctx.padding[0], width - 1 - ctx.padding[1])
                to_x = convolved(gradient, weight.flip(2, 3), None, around)
            if wanted[1]:
                to_weight = kernel_gradient(x, gradient, (height, width), ctx.padding)
        return to_x, to_weight, gradient.sum((0, 2, 3)) if wanted[2] else None, None


def kernel_gradient(x: Tensor, gradient: Tensor, kernel: Pair, padding: Pair) -> Tensor:
    """The gradient (C, 1, h, w) of a kernel from that of the output: by our own kernel, or strip by strip."""
    if gradient.shape == x.shape and kernel[1] in WIDTHS and has_wide_vectors() and may_run(x, gradient):
        return taps_gradient(channels_last(x), channels_last(gradient), kernel, padding)
    if kernel[0] == 1 < kernel[1]:
        return kernel_gradient(x.mT, gradient.mT, kernel[::-1], padding[::-1]).mT
    strips: list[Tensor] = []
    done, width = 0, min(STRIP, kernel[1])  # columns of the kernel
    for start in strip_starts(kernel[1]):
        strip = strip_gradient(x, gradient, (kernel[0], width), padding, start)
        strips.append(strip[..., done - start :])
        done = start + width
    return torch.cat(strips, 3)


def strip_starts(width: int) -> list[int]:
    """First columns of strips that cover a kernel; the middle one needs no copy of a padded map."""
    count = -(-width // STRIP)
    return [round(index * (width - STRIP) / (count - 1)) for index in range(count)] if count > 1 else [0]


def strip_gradient(x: Tensor, gradient: Tensor, strip: Pair, padding: Pair, start: int) -> Tensor:
    """That of the columns from `start` on."""
    rows, columns = x.shape[2:]
    left = padding[1] - start
    right = gradient.shape[3] + strip[1] - 1 - columns - left
    if min(left, right) <= -columns:  # the map ends before
        return x.new_zeros(x.shape[1], 1, *strip)
    above = padding[0] if strip[0] > rows else 0  # the library is slow again where the kernel is taller than the map
    if left != right or left < 0 or above:
        image = F.pad(x.permute(0, 2, 3, 1), (0, 0, left, right, above, above))  # (B, H, W, C)
        x, left = image.permute(0, 3, 1, 2), 0
    channels, inner = x.shape[1], [padding[0] - above, left]
    empty = x.new_empty(channels, 1, *strip)
    settings = ([1, 1], inner, [1, 1], False, [0, 0], channels, [False, True, False])
    found: Tensor = torch.ops.aten.convolution_backward(gradient, x, empty, None, *settings)[1]
    return found
