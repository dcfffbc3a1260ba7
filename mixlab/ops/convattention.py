"""Factorised attention with convolutional encodings of relative and absolute positions (CoaT, sections 4.1 to 4.3).

Queries, keys and values: (B, N, C), heads side by side in C. Windows are depthwise kernels (c, 1, s, s) over
consecutive channels of the image tokens, which lie after the class tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mixlab.core.grid import Grid
from mixlab.ops.depthwise import depthwise
from mixlab.ops.operator import Flat, Operator, gradients_of

NARROW = 12  # channels of a head up to which all heads share one product, most of which is thrown away


# -- factorised attention ------------------------------------------------------------------------


def factorised_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, heads: int, *, scaled: bool = True, softmax_query: bool = False
) -> Tensor:
    """phi(Q) (softmax(K)^T V), head by head, as the paper writes it."""
    width = query.shape[-1] // heads
    outputs = []
    for q, k, v in zip(query.split(width, -1), key.split(width, -1), value.split(width, -1), strict=True):
        context = k.softmax(1).transpose(1, 2) @ v  # (B, width, width)
        outputs.append((q.softmax(-1) if softmax_query else q) @ context)
    return torch.cat(outputs, -1) * (width**-0.5 if scaled else 1.0)


def factorised_attention(
    query: Tensor, key: Tensor, value: Tensor, heads: int, *, scaled: bool = True, softmax_query: bool = False
) -> Tensor:
    """`factorised_attention_reference` for all heads at once."""
    width = query.shape[-1] // heads
    scale = width**-0.5 if scaled else 1.0
    if width <= NARROW and not query.is_meta:  # without data it is counted, and what is thrown away does not count
        query = query.unflatten(2, (heads, width)).softmax(-1).flatten(2) if softmax_query else query
        return query @ own_heads(key.softmax(1).mT @ value, heads, scale)
    weights = key.softmax(1).unflatten(2, (heads, width)).permute(0, 2, 3, 1)  # (B, heads, width, N)
    values = value.unflatten(2, (heads, width)).transpose(1, 2)  # (B, heads, N, width)
    context = (weights @ values) * scale  # the smallest tensor here
    queries = query.unflatten(2, (heads, width)).transpose(1, 2)
    queries = queries.softmax(-1) if softmax_query else queries
    return (queries @ context).transpose(1, 2).flatten(2)


def own_heads(context: Tensor, heads: int, scale: float) -> Tensor:
    """(B, C, C) times `scale` where both channels belong to one head, zero elsewhere."""
    head = torch.arange(context.shape[-1], device=context.device) // (context.shape[-1] // heads)
    return (context * scale).masked_fill(head[:, None] != head, 0.0)


# -- with windows ---------------------------------------------------------------------------------


def conv_attention_reference(
    qkv: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    heads: int,
    grid: Grid,
    *,
    scaled: bool = True,
    softmax_query: bool = False,
) -> Tensor:
    """Factorised attention of (B, N, 3 C) plus queries times what the windows see of the values (Eq. 10)."""
    query, key, value = qkv.chunk(3, -1)
    mixed = factorised_attention_reference(query, key, value, heads, scaled=scaled, softmax_query=softmax_query)
    if not weights:
        return mixed
    parts = grid.to_map(value).split([len(weight) for weight in weights], 1)
    near = [
        F.conv2d(part, weight, bias, padding=weight.shape[-1] // 2, groups=len(weight))
        for part, weight, bias in zip(parts, weights, biases, strict=True)
    ]
    return mixed + grid.behind_zeros(grid.image(query) * grid.from_map(torch.cat(near, 1)))


def seen_by_windows(value: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], grid: Grid) -> Tensor:
    """What windows over consecutive channels see of the image tokens, (B, H*W, C)."""
    parts = grid.to_map(value).split([len(weight) for weight in weights], 1)
    seen = [
        depthwise(part, weight, bias, (weight.shape[2] // 2, weight.shape[3] // 2))
        for part, weight, bias in zip(parts, weights, biases, strict=True)
    ]
    return grid.from_map(torch.cat(seen, 1))


def add_seen(mixed: Tensor, query: Tensor, seen: Tensor, grid: Grid) -> Tensor:
    """Eq. 10: queries of the image times what windows see there, added in place to what attention has mixed."""
    grid.image(mixed).addcmul_(grid.image(query), seen)
    return mixed


def attend_to_itself(
    qkv: Tensor, windows: Sequence[Tensor | None], heads: int, grid: Sequence[int], scaled: bool, softmax_query: bool
) -> Tensor:
    query, key, value = qkv.chunk(3, -1)
    mixed = factorised_attention(query, key, value, heads, scaled=scaled, softmax_query=softmax_query)
    if not windows:
        return mixed
    return add_seen(mixed, query, seen_by_windows(value, *halves(windows), Grid(*grid)), Grid(*grid))


def conv_attention_gradient(
    gradients: list[Tensor],
    inputs: Flat,
    needed: list[bool],
    heads: int,
    grid: list[int],
    scaled: bool,
    softmax_query: bool,
) -> Flat:
    def written(qkv: Tensor, *windows: Tensor | None) -> Tensor:
        weights, biases = halves(windows)
        return conv_attention_reference(
            qkv, weights, biases, heads, Grid(*grid), scaled=scaled, softmax_query=softmax_query
        )

    return gradients_of(written, inputs, needed, gradients)


def halves(windows: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Weights and biases."""
    return windows[: len(windows) // 2], windows[len(windows) // 2 :]


CONV_ATTENTION = Operator(
    "conv_attention",
    attend_to_itself,
    inputs="Tensor qkv, Tensor?[] windows",
    settings="int heads, int[] grid, bool scaled, bool softmax_query",
    gradient=conv_attention_gradient,
)


def conv_attention(
    qkv: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    heads: int,
    grid: Grid,
    *,
    scaled: bool = True,
    softmax_query: bool = False,
) -> Tensor:
    """`conv_attention_reference` by a kernel where one serves; without windows factorised attention alone."""
    return CONV_ATTENTION(qkv, [*weights, *biases], heads, grid, scaled, softmax_query)


# -- the encoding of absolute positions ----------------------------------------------------------


def conv_position_reference(tokens: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid) -> Tensor:
    """Image tokens plus a depthwise convolution over them; class tokens as they are."""
    seen = F.conv2d(grid.to_map(tokens), weight, bias, padding=weight.shape[-1] // 2, groups=len(weight))
    return tokens + grid.behind_zeros(grid.from_map(seen))


def add_position(tokens: Tensor, weight: Tensor, bias: Tensor | None, grid: Sequence[int]) -> Tensor:
    """The same without a copy of zeros for the class tokens."""
    grid = Grid(*grid)
    around = (weight.shape[2] // 2, weight.shape[3] // 2)
    image = grid.image(tokens) + grid.from_map(depthwise(grid.to_map(tokens), weight, bias, around))
    return torch.cat([tokens[:, : grid.prefix], image], 1) if grid.prefix else image


def position_gradient(gradients: list[Tensor], inputs: Flat, needed: list[bool], grid: list[int]) -> Flat:
    def written(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return conv_position_reference(tokens, weight, bias, Grid(*grid))

    return gradients_of(written, inputs, needed, gradients)


CONV_POSITION = Operator(
    "conv_position",
    add_position,
    inputs="Tensor tokens, Tensor weight, Tensor? bias",
    settings="int[] grid",
    gradient=position_gradient,
)


def conv_position(tokens: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid) -> Tensor:
    """`conv_position_reference` by a kernel where one serves."""
    return CONV_POSITION(tokens, weight, bias, grid)
