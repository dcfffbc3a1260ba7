"""Factorised attention where queries, keys and values lie; `mixlab.ops.convattention` has the reference."""

import torch
from torch import Tensor

from mixlab.engine.kernels import constant, kernels, pointer, structure

PANEL = constant("CONTEXT_COLUMNS")

FactorAbout = structure("factor")
FactorGradientAbout = structure("factor_gradient")


def fits(*parts: Tensor) -> bool:
    """Whether (B, N, C) of one shape can be walked token by token."""
    first = parts[0].shape
    return all(
        part.shape == first
        and part.stride(2) == 1
        and (len(part) == 1 or part.stride(0) == part.shape[1] * part.stride(1))
        for part in parts
    )


def row_of(part: Tensor) -> int:
    """Numbers from a token of (B, N, C) to the next, also to that of the next image."""
    return part.stride(1) if part.shape[1] > 1 else part.stride(0)


def contexts_of(width: int) -> int:
    """Numbers that the kernel keeps of a head with so many channels."""
    return (width + 2) * -(-width // PANEL) * PANEL


def run_factor(
    query: Tensor, key: Tensor, value: Tensor, heads: int, *, scale: float, near: Tensor | None = None, prefix: int = 0
) -> Tensor:
    """query (softmax(key)^T value) * scale of (B, N, C), heads side by side; plus query * near (B, N - prefix, C)
    behind the first tokens.
    """
    return factor_and_contexts(query, key, value, heads, scale=scale, near=near, prefix=prefix)[0]


def factor_and_contexts(
    query: Tensor, key: Tensor, value: Tensor, heads: int, *, scale: float, near: Tensor | None, prefix: int
) -> tuple[Tensor, Tensor]:
    """The same, and what `factor_gradient` has to know of keys and values."""
    found, (images, tokens, channels) = kernels(), query.shape
    assert found is not None
    out, width = query.new_empty(query.shape), channels // heads
    contexts = query.new_empty(images * heads * contexts_of(width))
    pointers = (pointer(one) for one in (query, key, value, near, out, contexts))
    rows = map(row_of, (query, key, value))
    sizes = (tokens, images, heads, width, prefix, torch.get_num_threads())
    found.run("factor", FactorAbout(*pointers, *rows, *sizes, scale))
    return out, contexts


def factor_gradient(
    parts: tuple[Tensor, Tensor, Tensor],
    contexts: Tensor,
    gradient: Tensor,
    heads: int,
    *,
    scale: float,
    near: Tensor | None,
    prefix: int,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of query, key and value side by side, (B, N, 3 C), and of `near`, from that of `run_factor`."""
    found, (images, tokens, channels) = kernels(), gradient.shape
    assert found is not None
    out, to_near = gradient.new_empty(images, tokens, 3 * channels), None if near is None else torch.empty_like(near)
    pointers = (pointer(one) for one in (*parts, near, gradient, contexts, *out.chunk(3, -1), to_near))
    rows = (*map(row_of, parts), 3 * channels)
    sizes = (tokens, images, heads, channels // heads, prefix, torch.get_num_threads())
    found.run("factor_gradient", FactorGradientAbout(*pointers, None, *rows, *sizes, scale))
    return out, to_near
