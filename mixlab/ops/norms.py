"""Normalisation over all tokens and channels of an image together."""

import torch.nn.functional as F
from torch import Tensor

from mixlab.engine.kernels import may_run
from mixlab.engine.kernels.norm import Norm
from mixlab.engine.kernels.pool import run_whole_norm


def global_norm_reference(tokens: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Zero mean and unit variance over (N, C) of each image, then a weight per channel."""
    mean = tokens.mean((1, 2), keepdim=True)
    variance = tokens.var((1, 2), keepdim=True, correction=0)
    normed = (tokens - mean) / (variance + eps).sqrt() * weight
    return normed if bias is None else normed + bias


def global_norm(tokens: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """`global_norm_reference` by a kernel where it serves, else by group norm, which is fast on a channels-last map."""
    if may_run(tokens, weight, bias) and fits(tokens, weight, bias):
        return run_whole_norm(tokens, Norm(weight, bias, eps))
    column = tokens.unflatten(1, (-1, 1)).permute(0, 3, 1, 2)  # (B, C, N, 1)
    return F.group_norm(column, 1, weight, bias, eps).permute(0, 2, 3, 1).flatten(1, 2)


def fits(tokens: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether (B, N, C) can be walked row by row."""
    if weight is None or tokens.ndim != 3 or not tokens.is_contiguous():
        return False
    return all(one is None or (one.shape == tokens.shape[2:] and one.is_contiguous()) for one in (weight, bias))
