"""Softmax attention where queries, keys and values lie, and its gradient; `mixlab.ops.attention` has the reference."""

import torch
from torch import Tensor

from mixlab.engine.kernels import kernels, pointer, structure

AttentionAbout = structure("attention")
AttentionGradientAbout = structure("attention_gradient")


def fits(qkv: Tensor, heads: int) -> bool:
    """Whether (B, N, 3 * heads * D) can be walked token by token."""
    return qkv.ndim == 3 and heads > 0 and qkv.shape[2] % (3 * heads) == 0 and qkv.stride(2) == 1


def run_attention(qkv: Tensor, heads: int, logs: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(D)) v of (B, N, 3 * heads * D) as (B, N, heads * D). `logs`: room for what the gradient
    wants to know, (B, heads, N).
    """
    found, (images, tokens, width) = kernels(), sizes_of(qkv, heads)
    assert found is not None
    out = qkv.new_empty(images, tokens, heads * width)
    if logs is not None:
        check(logs, (images, heads, tokens))
    sizes = (tokens, 1, images, heads, width, torch.get_num_threads())
    pointers = (pointer(qkv), pointer(out), pointer(logs))
    found.run("attention", AttentionAbout(*pointers, qkv.stride(0), qkv.stride(1), *sizes, width**-0.5))
    return out


def attention_gradient(qkv: Tensor, heads: int, out: Tensor, logs: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of qkv, contiguous, from that of `run_attention`'s output."""
    found, (images, tokens, width) = kernels(), sizes_of(qkv, heads)
    assert found is not None
    check(out, (images, tokens, heads * width))
    check(logs, (images, heads, tokens))
    gradient = gradient if gradient.stride(2) == 1 else gradient.contiguous()
    if gradient.shape != out.shape:
        raise ValueError(f"A gradient has the shape of what it belongs to: {out.shape}; got {gradient.shape}.")
    to_qkv = qkv.new_empty(qkv.shape)
    pointers = (pointer(one) for one in (qkv, out, logs, gradient, to_qkv))
    strides = (qkv.stride(0), qkv.stride(1), gradient.stride(0), gradient.stride(1))
    sizes = (tokens, images, heads, width, torch.get_num_threads())
    found.run("attention_gradient", AttentionGradientAbout(*pointers, *strides, *sizes, width**-0.5))
    return to_qkv


def sizes_of(qkv: Tensor, heads: int) -> tuple[int, int, int]:
    if not fits(qkv, heads):
        raise ValueError(f"Attention takes (B, N, 3 * {heads} * D), channels side by side; got {tuple(qkv.shape)}.")
    return qkv.shape[0], qkv.shape[1], qkv.shape[2] // (3 * heads)


def check(x: Tensor, shape: tuple[int, ...]) -> None:
    if x.shape != shape or not x.is_contiguous():
        raise ValueError(f"Attention needs contiguous numbers of shape {shape} here; got {tuple(x.shape)}.")
