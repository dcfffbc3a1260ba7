"""Depthwise convolutions over channels-last maps whose kernels are learned."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mixlab.ops.operator import Flat, Operator, gradients_of

Pair = tuple[int, int]  # rows, columns


def depthwise_reference(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Any) -> Tensor:
    """(B, C, H, W) with kernels (C, 1, h, w)."""
    return F.conv2d(x, weight, bias, padding=tuple(padding), groups=len(weight))


def depthwise_gradient(gradients: list[Tensor], inputs: Flat, needed: list[bool], padding: list[int]) -> Flat:
    """A bias is only added, and need not be there."""
    (gradient,) = gradients
    both: Flat = [None, None]
    if any(needed[:2]):
        both = gradients_of(
            lambda x, weight: depthwise_reference(x, weight, None, padding), inputs[:2], needed[:2], gradients
        )
    return [*both, gradient.sum((0, 2, 3)) if needed[2] else None]


DEPTHWISE = Operator(
    "depthwise",
    depthwise_reference,
    inputs="Tensor x, Tensor weight, Tensor? bias",
    settings="int[2] padding",
    gradient=depthwise_gradient,
    reads=lambda needed, *settings: [True, True, False],
)


def depthwise(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Pair) -> Tensor:
    """`depthwise_reference` by the fastest backend that serves."""
    return DEPTHWISE(x, weight, bias, padding)
