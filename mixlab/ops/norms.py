"""Norms over the channels of a token, also of a product, and over all tokens and channels of an image together."""

import torch.nn.functional as F
from torch import Tensor

from mixlab.ops.operator import Operator


def layer_norm_reference(
    x: Tensor, factor: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Zero mean and unit variance over the last axis of x, or of x times a factor."""
    x = x if factor is None else x * factor
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


LAYER_NORM = Operator(
    "layer_norm",
    layer_norm_reference,
    inputs="Tensor x, Tensor? factor, Tensor? weight, Tensor? bias",
    settings="float eps",
)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, factor: Tensor | None = None
) -> Tensor:
    """`layer_norm_reference` of (B, ..., C) by a kernel where one serves."""
    return LAYER_NORM(x, factor, weight, bias, eps)


def global_norm_reference(tokens: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Zero mean and unit variance over (N, C) of each image, then a weight per channel."""
    mean = tokens.mean((1, 2), keepdim=True)
    variance = tokens.var((1, 2), keepdim=True, correction=0)
    normed = (tokens - mean) / (variance + eps).sqrt() * weight
    return normed if bias is None else normed + bias


def group_norm(tokens: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """The same as a group norm, which is fast on a channels-last map."""
    column = tokens.unflatten(1, (-1, 1)).permute(0, 3, 1, 2)  # (B, C, N, 1)
    return F.group_norm(column, 1, weight, bias, eps).permute(0, 2, 3, 1).flatten(1, 2)


GLOBAL_NORM = Operator(
    "global_norm", group_norm, inputs="Tensor tokens, Tensor? weight, Tensor? bias", settings="float eps"
)


def global_norm(tokens: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`global_norm_reference` by a kernel where one serves."""
    return GLOBAL_NORM(tokens, weight, bias, eps)
