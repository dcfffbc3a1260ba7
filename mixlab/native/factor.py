"""Factorised attention where queries, keys and values lie; `mixlab.ops.convattention` has the reference."""

import ctypes
from ctypes import c_float, c_int, c_long, c_ssize_t, c_void_p

import torch
from torch import Tensor

from mixlab.native import kernels, pointer


class FactorAbout(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("query", "key", "value", "near", "out", "contexts")),
        *((name, c_ssize_t) for name in ("query_row", "key_row", "value_row")),
        ("tokens", c_long),
        *((name, c_int) for name in ("images", "heads", "width", "prefix", "threads")),
        ("scale", c_float),
    )


def fits(*parts: Tensor) -> bool:
    """Whether (B, N, C) of one shape can be walked token by token."""
    first = parts[0].shape
    return all(
        part.shape == first
        and part.stride(2) == 1
        and (len(part) == 1 or part.stride(0) == part.shape[1] * part.stride(1))
        for part in parts
    )


def run_factor(
    query: Tensor, key: Tensor, value: Tensor, heads: int, *, scale: float, near: Tensor | None = None, prefix: int = 0
) -> Tensor:
    """query (softmax(key)^T value) * scale of (B, N, C), heads side by side; plus query * near (B, N - prefix, C)
    behind the first tokens.
    """
    found, (images, tokens, channels) = kernels(), query.shape
    assert found is not None
    out = query.new_empty(query.shape)
    pointers = (pointer(one) for one in (query, key, value, near, out))
    rows = (query.stride(1), key.stride(1), value.stride(1))
    sizes = (tokens, images, heads, channels // heads, prefix, torch.get_num_threads())
    found.run("factor", FactorAbout(*pointers, None, *rows, *sizes, scale))
    return out
