"""Projections with blocks of 4 x 4 weights, from tokens to heads and back: `mixlab.ops.blockdiagonal` has the
references.
"""

import torch
from torch import Tensor

from mixlab.engine.kernels import kernels, pointer, structure
from mixlab.engine.kernels.mlstm import BLOCK, turned

HeadsAbout = structure("heads")
BlocksAbout = structure("blocks_gradient")


def to_heads(x: Tensor, weight: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """(B, T, C) through blocks (C / 4, 4, 4) as (heads, B, T, C / heads)."""
    (batch, steps, channels), width = x.shape, x.shape[2] // heads
    out = x.new_empty(heads, batch, steps, width)
    run(x, weight, bias, out, (channels, width), (width, batch * steps * width), (heads, width))
    return out


def from_heads(x: Tensor, weight: Tensor) -> Tensor:
    """The way back: (heads, B, T, D) through blocks as (B, T, heads * D)."""
    heads, batch, steps, width = x.shape
    out = x.new_empty(batch, steps, heads * width)
    run(x, weight, None, out, (width, batch * steps * width), (heads * width, width), (heads, width))
    return out


def run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    x_strides: tuple[int, int],
    out_strides: tuple[int, int],
    sizes: tuple[int, int],
) -> None:
    """Strides are those from a row to the next and from a head to the next."""
    found, weights = kernels(), turned(weight)
    assert found is not None
    pointers = (pointer(x), pointer(weights), pointer(bias), pointer(out))
    rows = x.numel() // (sizes[0] * sizes[1])
    found.run("heads", HeadsAbout(*pointers, *x_strides, *out_strides, rows, *sizes, torch.get_num_threads()))


def blocks_gradient(x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of blocks (C / 4, 4, 4) and of a bias from x (B, T, C) and that of `to_heads`."""
    found, (heads, batch, steps, width) = kernels(), gradient.shape
    assert found is not None
    channels = heads * width
    sums = x.new_empty(BLOCK + 1, channels)
    strides = (channels, width, width, batch * steps * width)
    sizes = (batch * steps, heads, width, 1, torch.get_num_threads())
    found.run("blocks_gradient", BlocksAbout(pointer(x), pointer(gradient), pointer(sums), None, *strides, *sizes))
    weight, places = x.new_empty(channels // BLOCK, BLOCK, BLOCK), torch.arange(BLOCK)
    for by in range(BLOCK):
        weight[:, places, (places + by) % BLOCK] = sums[by].view(-1, BLOCK)
    return weight, sums[BLOCK]
