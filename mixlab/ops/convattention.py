"""Factorised attention (CoaT, Eqs. 2 and 3). Queries, keys and values: (B, N, C), heads side by side in C."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mixlab.ops.depthwise import convolved

NARROW = 12  # channels of a head up to which all heads share one product, most of which is thrown away


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


def depthwise_in_one(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> Tensor:
    """Depthwise convolutions with kernels of several odd sizes over consecutive channels, padded to the largest."""
    size = max(weight.shape[-1] for weight in weights)
    around = [(size - weight.shape[-1]) // 2 for weight in weights]
    weight = torch.cat([F.pad(one, (edge,) * 4) for one, edge in zip(weights, around, strict=True)])
    known = [bias for bias in biases if bias is not None]
    return convolved(x, weight, torch.cat(known) if known else None, (size // 2, size // 2))
