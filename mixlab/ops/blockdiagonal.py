"""Linear layers whose weight is block-diagonal: channels mix within small blocks only."""

from typing import Any

import torch
from torch import Tensor

from mixlab.engine.kernels.heads import blocks_gradient, from_heads, to_heads
from mixlab.engine.kernels.mlstm import BLOCK, WIDTH
from mixlab.ops.written import is_as_written, may_train, written_gradients

GROUP = 32  # channels of neighbouring blocks that go through one dense product
WHOLE = 48  # channels of a head up to which it is one product, which spares a copy


def block_diagonal(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(..., C) with weights (blocks, out, in) of each block and a bias (C), as it is written."""
    blocks = x.unflatten(-1, (len(weight), -1))
    out = torch.einsum("...bi,boi->...bo", blocks, weight).flatten(-2)
    return out if bias is None else out + bias


def densify_heads(weight: Tensor, heads: int) -> Tensor:
    """What `grouped_heads` multiplies with: (groups, in, out) of neighbouring blocks within a head.

    Blocks of a few channels starve a matrix product, so neighbours share one; the zeros between them cost less.
    """
    return densify(weight, group_width(len(weight) * weight.shape[1] // heads, weight.shape[1]))


def grouped_heads(x: Tensor, dense: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """`block_diagonal` of (B, T, C) with `densify_heads` of its weight: contiguous heads, (heads, B, T, C / heads)."""
    (batch, steps, channels), width, dense = x.shape, dense.shape[-1], dense.to(x.dtype)
    groups = x.reshape(batch * steps, channels // width, width).transpose(0, 1)  # (groups, B * T, in)
    if bias is None or torch.compiler.is_compiling():
        out = torch.bmm(groups, dense)
    else:
        out = torch.baddbmm(bias.view(-1, 1, width).to(x.dtype), groups, dense)
    out = out.unflatten(0, (heads, -1)).transpose(1, 2).reshape(heads, batch, steps, channels // heads)
    if bias is not None and torch.compiler.is_compiling():  # there it costs nothing, since it is done while copying
        out = out + bias.view(heads, 1, 1, -1).to(x.dtype)
    return out


def may_train_heads(x: Tensor, weight: Tensor, bias: Tensor | None, heads: int) -> bool:
    """Whether `trained_heads` may compute these: plain float32 numbers of a CPU, of which a gradient is wanted."""
    if not may_train(x, weight, bias):
        return False
    channels = x.shape[-1]
    fits = x.ndim == 3 and channels % (heads * WIDTH) == 0 and weight.shape == (channels // BLOCK, BLOCK, BLOCK)
    return fits and (bias is None or bias.shape == (channels,))


def trained_heads(x: Tensor, weight: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """`block_diagonal` of (B, T, C) as contiguous heads (heads, B, T, C / heads), without products of matrices."""
    found: Tensor = HeadsGradient.apply(x, weight, bias, heads)
    return found


def heads_of(x: Tensor, weight: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """The same as it is written."""
    return block_diagonal(x, weight, bias).unflatten(-1, (heads, -1)).permute(2, 0, 1, 3)


class HeadsGradient(torch.autograd.Function):
    """Its gradients can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, heads: int) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.heads = heads
        return to_heads(x.contiguous(), weight, None if bias is None else bias.contiguous(), heads)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, bias), needed = ctx.saved_tensors, ctx.needs_input_grad
        if is_as_written(gradient):

            def written(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
                return heads_of(x, weight, bias, ctx.heads)

            return *written_gradients(written, (x, weight, bias), needed[:3], gradient), None
        gradient = gradient.contiguous()
        to_weight = to_bias = None
        if needed[1] or needed[2]:
            to_weight, to_bias = blocks_gradient(x.contiguous(), gradient)
        to_x = from_heads(gradient, weight.mT) if needed[0] else None
        return to_x, to_weight if needed[1] else None, to_bias if needed[2] else None, None


def group_width(channels: int, block: int) -> int:
    """The widest run of whole blocks up to `GROUP` channels that divides a head; a narrow head as a whole."""
    if channels <= WHOLE:
        return channels
    widths = [width for width in range(block, max(GROUP, block) + 1, block) if channels % width == 0]
    return widths[-1]


def densify(weight: Tensor, width: int) -> Tensor:
    """(blocks, out, in) as dense (groups, in, out) of `width` channels, zeros between the blocks."""
    grouped = weight.unflatten(0, (-1, width // weight.shape[1])).permute(0, 3, 2, 1)  # (groups, in, out, blocks)
    return torch.diag_embed(grouped, dim1=1, dim2=3).reshape(-1, width, width)
