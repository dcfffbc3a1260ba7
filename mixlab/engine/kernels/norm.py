"""Layer norm, also of a product of two, in one pass."""

from typing import NamedTuple

import torch
from torch import Tensor

from mixlab.engine.kernels import kernels, pointer, structure


class Norm(NamedTuple):
    """A layer norm; without a weight none at all."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float


NormAbout = structure("norm")


def norm_of_product(one: Tensor, other: Tensor | None, norm: Norm) -> Tensor:
    """(B, N, C) with contiguous channels and images; without a weight only the product."""
    found, (batch, tokens, width), (weight, bias, eps) = kernels(), one.shape, norm
    assert found is not None
    out = one.new_empty(one.shape)
    pointers = (pointer(part) for part in (one, other, weight, bias, out))
    rows = (one.stride(1), 0 if other is None else other.stride(1))
    found.run("norm", NormAbout(*pointers, *rows, batch * tokens, width, torch.get_num_threads(), eps))
    return out


def fits(*parts: Tensor) -> bool:
    """Whether these (B, N, C) of one shape can be walked row by row."""
    return all(
        part.shape == parts[0].shape and part.stride(2) == 1 and part.stride(0) == part.shape[1] * part.stride(1)
        for part in parts
    )
