"""Factorised attention (CoaT, Eqs. 2 and 3). Queries, keys and values: (B, N, C), heads side by side in C."""

import torch
from torch import Tensor


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
    weights = key.softmax(1).unflatten(2, (heads, width)).permute(0, 2, 3, 1)  # (B, heads, width, N)
    values = value.unflatten(2, (heads, width)).transpose(1, 2)  # (B, heads, N, width)
    context = weights @ values
    context = context * width**-0.5 if scaled else context  # the smallest tensor here
    queries = query.unflatten(2, (heads, width)).transpose(1, 2)
    queries = queries.softmax(-1) if softmax_query else queries
    return (queries @ context).transpose(1, 2).flatten(2)
