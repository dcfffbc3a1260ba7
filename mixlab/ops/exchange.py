"""Tokens of several scales, summed on the grid of each (CoaT, section 5.1)."""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mixlab.core.grid import Grid
from mixlab.ops.operator import Flat, Operator, anywhere, gradients_of


def move(tokens: Tensor, source: Grid, target: Grid) -> Tensor:
    """Image tokens bilinearly on another grid; class tokens as they are."""
    if source == target:
        return tokens
    size = (target.height, target.width)
    image = source.from_map(F.interpolate(source.to_map(tokens), size, mode="bilinear", align_corners=False))
    return torch.cat([tokens[:, : source.prefix], image], 1) if source.prefix else image


def total(tensors: Iterable[Tensor]) -> Tensor:
    first, *others = tensors
    for other in others:
        first = first + other
    return first


def exchange_reference(updates: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
    """On every grid the sum of all that is moved there."""
    return [total(move(update, grid, target) for update, grid in zip(updates, grids, strict=True)) for target in grids]


def exchange_flat(updates: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """`exchange_reference` with heights, widths and class tokens of the grids one after the other."""
    return exchange_reference(updates, grids_of(sizes))


def exchange_gradient(gradients: list[Tensor], inputs: Flat, needed: list[bool], sizes: list[int]) -> Flat:
    """Linear, so that it is the same for all updates."""
    places, all_of_them = [anywhere(gradient) for gradient in gradients], [True] * len(needed)
    return gradients_of(lambda *updates: exchange_flat(updates, sizes), places, all_of_them, gradients)


def grids_of(sizes: Sequence[int]) -> list[Grid]:
    return [Grid(*sizes[first : first + 3]) for first in range(0, len(sizes), 3)]


EXCHANGE = Operator(
    "exchange",
    exchange_flat,
    inputs="Tensor[] updates",
    settings="int[] sizes",
    output="Tensor[]",
    gradient=exchange_gradient,
    reads=lambda needed, *settings: [False] * len(needed),
)


def exchange(updates: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
    """`exchange_reference` by a kernel where one serves."""
    return list(EXCHANGE(list(updates), [side for grid in grids for side in grid]))
