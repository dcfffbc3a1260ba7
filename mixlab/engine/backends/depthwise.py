"""Depthwise convolutions by our own kernel, and the gradient of their kernels.

A CPU's library has a fast kernel gradient for kernels of up to three columns only; wider ones go through dense products
of 16 x 16 channels, of which 15/16 are thrown away. Wide kernels are therefore cut into strips of three columns, and
kernels of one row are laid down as a column. The convolution itself, also of a gradient, and the kernel gradient are
our own kernels' where these are faster.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mixlab.engine.kernels.depthwise import convolve_channels, fits, taps_gradient
from mixlab.engine.reasons import needs, why_no_wide_kernel
from mixlab.ops.depthwise import DEPTHWISE, Pair
from mixlab.ops.operator import Backend, Flat, TrainingBackend, why_not_plain

WIDTHS = (5, 7)  # columns of a kernel that our own convolution was measured for
STRIP = 3  # columns of a kernel whose gradient is fast


# -- without gradients ---------------------------------------------------------------------------


def supports(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int]) -> str | None:
    reason = why_no_wide_kernel(x, weight, bias)
    if reason or x.ndim != 4 or weight.ndim != 4:
        return reason or "no maps (B, C, H, W) with kernels (C, 1, h, w)"
    centred = all(size == 2 * around + 1 for size, around in zip(weight.shape[2:], padding, strict=True))
    return (
        needs(centred, "a map that does not keep its size")
        or needs(weight.shape[2] > 1 and weight.shape[3] in WIDTHS, f"kernels that are not {WIDTHS} columns wide")
        or needs(fits(x.permute(0, 2, 3, 1), weight, bias), "maps without channels side by side")
    )


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int]) -> Tensor:
    around = (padding[0], padding[1])
    return convolve_channels(x.permute(0, 2, 3, 1), weight, bias, around).permute(0, 3, 1, 2)


DEPTHWISE.serve(Backend("kernel", supports, convolve))


# -- in training ---------------------------------------------------------------------------------


def supports_training(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int]) -> str | None:
    reason = why_not_plain(x, weight, bias)
    if reason or x.ndim != 4 or weight.ndim != 4:
        return reason or "no maps (B, C, H, W) with kernels (C, 1, h, w)"
    inside = all(around < size for around, size in zip(padding, weight.shape[2:], strict=True))
    return (
        needs(inside, "a border that is wider than the kernel")
        or needs(weight.requires_grad, "kernels that are not learned")
        or needs(weight.shape[3] > STRIP, "narrow kernels, whose gradient is fast in PyTorch")
    )


def train(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    return DEPTHWISE.compute(x, weight, bias, padding), []


def gradient(
    gradients: list[Tensor], inputs: Flat, saved: list[Tensor], needed: list[bool], padding: Sequence[int]
) -> Flat:
    (gradient,), (x, weight, _) = gradients, inputs
    assert x is not None
    assert weight is not None
    height, width = weight.shape[2:]
    to_x = to_weight = None
    if needed[0]:  # the same convolution with the kernel turned round
        around = (height - 1 - padding[0], width - 1 - padding[1])
        to_x = DEPTHWISE.compute(gradient, weight.flip(2, 3), None, around)
    if needed[1]:
        to_weight = kernel_gradient(x, gradient, (height, width), (padding[0], padding[1]))
    return [to_x, to_weight, gradient.sum((0, 2, 3)) if needed[2] else None]


DEPTHWISE.train(TrainingBackend("strips", supports_training, train, gradient))


def channels_last(x: Tensor) -> Tensor:
    """(B, H, W, C) of (B, C, H, W), with the channels of a pixel side by side."""
    x = x.permute(0, 2, 3, 1)
    return x if x.stride(3) == 1 else x.contiguous()


def kernel_gradient(x: Tensor, gradient: Tensor, kernel: Pair, padding: Pair) -> Tensor:
    """The gradient (C, 1, h, w) of a kernel from that of the output: by our own kernel, or strip by strip."""
    if gradient.shape == x.shape and kernel[1] in WIDTHS and why_no_wide_kernel(x, gradient) is None:
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
