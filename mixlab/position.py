"""Learned position tables."""

import torch
from torch import Tensor, nn

from mixlab.grid import Grid
from mixlab.ops.resample import resample_map


class PositionTable(nn.Module):
    """A learned vector per cell of a reference grid, added to the image tokens; resampled for any other grid."""

    initialises_itself = True
    undecayed = ("table",)

    def __init__(self, grid: Grid, dim: int) -> None:
        super().__init__()
        self.grid = Grid(grid.height, grid.width)
        self.table = nn.Parameter(torch.empty(1, grid.height, grid.width, dim))
        nn.init.trunc_normal_(self.table, std=0.02)

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        table = resample_table(self.table, grid).flatten(1, 2)  # (1, H*W, C)
        return tokens + grid.behind_zeros(table).to(tokens.dtype)

    def resize(self, name: str, value: Tensor, source: Grid | None) -> Tensor:
        """A stored table of another grid on this one's; what is no table is left for the caller to report."""
        return resample_table(value, self.grid) if value.ndim == 4 else value


def resample_table(table: Tensor, grid: Grid) -> Tensor:
    """(1, H, W, C) on another grid."""
    if tuple(table.shape[1:3]) == (grid.height, grid.width):
        return table
    return resample_map(table.permute(0, 3, 1, 2), grid).permute(0, 2, 3, 1)
