"""Tokens of one grid on another, bilinearly, and the way back of their gradient: `mixlab.ops.exchange` has the
reference.
"""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mixlab.core.grid import Grid
from mixlab.engine.kernels import kernels, pointer, structure

ResampleAbout = structure("resample")


class Sums(NamedTuple):
    """What every place of an axis is made of: where its part of the two lists starts, places and weights."""

    starts: Tensor
    places: Tensor
    weights: Tensor


@functools.lru_cache(maxsize=256)
def sums_of(source: int, target: int, back: bool) -> Sums:
    """Of an axis of `target` places, bilinearly from one of `source`; `back`: of the gradient, the other way."""
    with torch.inference_mode(False), torch.no_grad():
        each = torch.eye(source, device="cpu", dtype=torch.float32)[None]
        matrix = F.interpolate(each, target, mode="linear", align_corners=False)[0]  # (source, target)
        infinite = each.masked_fill(each == 1, torch.inf)  # shows what is looked at with a weight of 0, too
        is_seen = F.interpolate(infinite, target, mode="linear", align_corners=False)[0] != 0
        matrix, is_seen = (matrix, is_seen) if back else (matrix.T, is_seen.T)
        row, place = is_seen.nonzero(as_tuple=True)
        starts = F.pad(is_seen.sum(1).cumsum(0), (1, 0))
        return Sums(starts.int(), place.int(), matrix[row, place])


def resample_tokens(x: Tensor, source: Grid, out: Tensor, target: Grid, *, back: bool = False, adds: bool) -> None:
    """(B, N, C) of one grid as that of another, written or added to `out`. `back`: a gradient of the source's tokens
    from that of the target's, x.
    """
    found, (images, _, channels) = kernels(), x.shape
    assert found is not None
    here, there = (target, source) if back else (source, target)  # of x, of out
    rows = sums_of(source.height, target.height, back)
    columns = sums_of(source.width, target.width, back)
    pointers = (pointer(one) for one in (x, out, *rows, *columns))
    sizes = (images, source.prefix, here.height, here.width, there.height, there.width, channels)
    found.run("resample", ResampleAbout(*pointers, *sizes, adds, torch.get_num_threads()))
