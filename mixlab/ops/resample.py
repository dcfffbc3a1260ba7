"""Tensors that belong to one grid, brought to another."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mixlab.core.grid import Grid


def resample_map(values: Tensor, target: Grid) -> Tensor:
    """A (B, C, H, W) map on the target grid: bilinear between cell centres, smoothed where it shrinks."""
    size = (target.height, target.width)
    exact = values if values.dtype is torch.float64 else values.float()
    return F.interpolate(exact, size, mode="bilinear", antialias=True).to(values.dtype)


def resample_mixing_matrix(matrix: Tensor, source: Grid, target: Grid) -> Tensor:
    """An (N, N) matrix whose rows sum to 1, from one grid to another: both axes resampled, rows renormalised."""
    if (source.height, source.width) == (target.height, target.width):
        return matrix
    inputs = matrix[None].unflatten(2, (source.height, source.width))  # (1, N out, H in, W in)
    inputs = resample_map(inputs, target).flatten(2).transpose(1, 2)
    outputs = inputs.unflatten(2, (source.height, source.width))  # (1, N' in, H out, W out)
    resampled = resample_map(outputs, target).flatten(2)[0].T
    return resampled / resampled.sum(1, keepdim=True)


def rescale_map(values: Tensor, factor: float, height: int, width: int) -> Tensor:
    """A map with `factor` times the cells per side, cut or continued right and bottom to height x width cells.

    A pixel stays where it is: a map whose last cells reach beyond the image is not squeezed into it.
    """
    wanted = (math.ceil(height / factor), math.ceil(width / factor))  # cells in front that give enough behind
    bottom, right = (max(0, want - have) for want, have in zip(wanted, values.shape[2:], strict=True))
    dtype, values = values.dtype, F.pad(values.float(), (0, right, 0, bottom), mode="replicate")
    scaled = F.interpolate(values, scale_factor=factor, mode="bilinear", antialias=True, recompute_scale_factor=False)
    return scaled[:, :, :height, :width].to(dtype)


def resample_taps(values: Tensor, size: int, *, axis: int, centred: bool) -> Tensor:
    """`size` values along an axis, linear between those that are there: the ends stay ends, and a centre the centre."""
    given = values.shape[axis]
    if given == size:
        return values
    dtype = torch.float32 if values.device.type == "mps" else torch.float64
    places = torch.linspace(0, given - 1, size, dtype=dtype, device=values.device)
    if size == 1 and centred:
        places = places + (given - 1) / 2
    below = places.floor().long()
    share = (places - below).to(values.dtype).unflatten(0, (size, *[1] * (values.ndim - 1 - axis % values.ndim)))
    above = (below + 1).clamp(max=given - 1)
    return torch.lerp(values.index_select(axis, below), values.index_select(axis, above), share)
