"""Linear layers whose weight is block-diagonal: channels mix within small blocks only."""

import torch
from torch import Tensor

from mixlab.ops.operator import Flat, Operator, gradients_of

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


def heads_reference(x: Tensor, weight: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """`block_diagonal` of (B, T, C) as heads (heads, B, T, C / heads)."""
    return block_diagonal(x, weight, bias).unflatten(-1, (heads, -1)).permute(2, 0, 1, 3)


def dense_heads(x: Tensor, weight: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """The same by products of neighbouring blocks. Without data only what the layer needs counts."""
    if x.is_meta:
        return heads_reference(x, weight, bias, heads)
    return grouped_heads(x, densify_heads(weight, heads), bias, heads)


def heads_gradient(gradients: list[Tensor], inputs: Flat, needed: list[bool], heads: int) -> Flat:
    return gradients_of(lambda x, weight, bias: heads_reference(x, weight, bias, heads), inputs, needed, gradients)


BLOCK_HEADS = Operator(
    "block_heads",
    dense_heads,
    inputs="Tensor x, Tensor weight, Tensor? bias",
    settings="int heads",
    gradient=heads_gradient,
)


def block_heads(x: Tensor, weight: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """`heads_reference` by a kernel where one serves."""
    return BLOCK_HEADS(x, weight, bias, heads)


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
