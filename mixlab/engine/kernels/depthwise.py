"""Depthwise convolutions over maps with channels last, also with the product and the norm that follow in Hyena."""

from ctypes import c_int
from typing import Any

import torch
from torch import Tensor

from mixlab.engine.kernels import activation_number, kernels, pointer, structure
from mixlab.engine.kernels.longconv import row_of

Pair = tuple[int, int]  # rows, columns

DepthwiseAbout = structure("depthwise")
TapsAbout = structure("taps")


def fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether maps (B, H, W, C) and kernels (C, 1, h, w) belong together and can be walked."""
    if x.ndim != 4 or weight.ndim != 4 or weight.shape[:2] != (x.shape[3], 1) or x.stride(3) != 1:
        return False
    return weight.is_contiguous() and (bias is None or (bias.is_contiguous() and bias.shape == weight.shape[:1]))


def joins(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None) -> bool:
    """Whether that, and a norm of a third of the channels."""
    return fits(x, weight, bias) and (norm is None or (norm.shape == (x.shape[3] // 3,) and norm.is_contiguous()))


def strides_of(x: Tensor) -> Pair:
    """Numbers from a pixel of (B, H, W, C) to the next and from an image to the next."""
    row = row_of(x)
    return row, x.stride(0) if len(x) > 1 else x.shape[1] * x.shape[2] * row


def with_equal_rows(x: Tensor) -> Tensor:
    """(B, H, W, C) whose pixels lie at equal distances within an image: as it is, or a copy."""
    row, (_, height, width, channels) = row_of(x), x.shape
    wanted = zip((height, width, channels), x.stride()[1:], (width * row, row, 1), strict=True)
    return x if all(size == 1 or stride == needed for size, stride, needed in wanted) else x.contiguous()


def convolve_channels(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: Pair,
    after: str = "none",
    *,
    turned: bool = False,
    out: Tensor | None = None,
    adds: bool = False,
) -> Tensor:
    """(B, H, W, C) with kernels (C, 1, h, w); padding above and in front, and behind what keeps the size.

    `turned`: the same for maps that are read from their last pixel to the first. `out`: where to, of pixels at equal
    distances within an image; `adds`: to what is there.
    """
    out = x.new_empty(x.shape) if out is None else out
    if turned:
        padding = (weight.shape[2] - 1 - padding[0], weight.shape[3] - 1 - padding[1])
    about = {"channels": x.shape[3], "after": activation_number(after), "turned": turned, "adds": adds}
    run(x, weight, bias, padding, out, part=(0, -1, -1), **about)
    return out


def convolve_and_multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: Pair,
    parts: tuple[int, int, int],
    norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Maps with three parts of channels: the product of the convolutions of the first two that are named, normed, and
    the convolution of the third.
    """
    channels = x.shape[3] // 3
    out, aside = (x.new_empty(*x.shape[:3], channels) for _ in range(2))
    part = tuple(channels * place for place in parts)
    run(x, weight, bias, padding, out, aside=pointer(aside), channels=channels, part=part, norm=pointer(norm), eps=eps)
    return out, aside


def run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: Pair,
    out: Tensor,
    *,
    part: tuple[int, ...],
    **given: Any,
) -> None:
    found, (images, height, width, _) = kernels(), x.shape
    assert found is not None
    x = with_equal_rows(x)
    (row, image), (out_row, out_image) = strides_of(x), strides_of(out)
    about = DepthwiseAbout(
        x=pointer(x),
        weight=pointer(weight),
        bias=pointer(bias),
        out=pointer(out),
        row=row,
        image=image,
        out_row=out_row,
        out_image=out_image,
        part=(c_int * 3)(*part),
        images=images,
        height=height,
        width=width,
        high=weight.shape[2],
        wide=weight.shape[3],
        above=padding[0],
        before=padding[1],
        threads=torch.get_num_threads(),
        **given,
    )
    found.run("depthwise", about)


def taps_gradient(x: Tensor, gradient: Tensor, kernel: Pair, padding: Pair, *, to_bias: Tensor | None = None) -> Tensor:
    """The gradient (C, 1, h, w) of the kernels of `convolve_channels` from that of its output; 3, 5 or 7 columns.

    That of the bias is written to `to_bias`.
    """
    found, (images, height, width, channels) = kernels(), x.shape
    assert found is not None
    x, gradient = with_equal_rows(x), with_equal_rows(gradient)
    out = x.new_empty(channels, 1, *kernel)
    pointers = (pointer(x), pointer(gradient), pointer(out), pointer(to_bias), None)
    sizes = (images, height, width, channels, *kernel, *padding, 1, torch.get_num_threads())
    found.run("taps", TapsAbout(*pointers, *strides_of(x), *strides_of(gradient), *sizes))
    return out
