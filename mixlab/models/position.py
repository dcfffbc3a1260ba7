"""Learned position tables."""

import math

import torch
from torch import Tensor, nn

from mixlab.core.grid import Grid
from mixlab.core.hooks import derived
from mixlab.ops.resample import resample_map


class PositionTable(nn.Module):
    """A learned vector per cell of a reference grid, added to the image tokens; resampled for any other grid, in eval
    mode once, until the table or the grid changes.

    `class_tokens` of them may have vectors of their own.
    """

    initializes_itself = True
    undecayed = ("table", "prefix")

    def __init__(self, grid: Grid, dim: int, class_tokens: int = 0) -> None:
        super().__init__()
        self.grid = Grid(grid.height, grid.width)
        self.table = nn.Parameter(torch.empty(1, grid.height, grid.width, dim))
        self.prefix = nn.Parameter(torch.empty(1, class_tokens, dim)) if class_tokens else None
        for parameter in self.parameters():
            nn.init.trunc_normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        table = self.table_for(grid).flatten(1, 2)  # (1, H*W, C)
        table = grid.behind_zeros(table) if self.prefix is None else torch.cat([self.prefix, table], 1)
        return tokens + table.to(tokens.dtype)

    def table_for(self, grid: Grid) -> Tensor:
        """(1, H, W, C)"""
        if self.grid == Grid(grid.height, grid.width):
            return self.table
        return derived(self, ("table", grid), [self.table], lambda: resample_table(self.table, grid), cheap=True)

    def resize(self, name: str, value: Tensor, source: Grid | None) -> Tensor:
        """A stored table of another grid on this one's; what is no table is left for the caller to report."""
        if name == "table" and value.ndim == 3:  # (1, H*W, C) of foreign code: of a square image, or else of this size
            side = math.isqrt(value.shape[1])
            known = (side, side) if side * side == value.shape[1] else (self.grid.height, self.grid.width)
            value = value.unflatten(1, known) if math.prod(known) == value.shape[1] else value
        return resample_table(value, self.grid) if name == "table" and value.ndim == 4 else value


def resample_table(table: Tensor, grid: Grid) -> Tensor:
    """(1, H, W, C) on another grid."""
    if tuple(table.shape[1:3]) == (grid.height, grid.width):
        return table
    return resample_map(table.permute(0, 3, 1, 2), grid).permute(0, 2, 3, 1)
