"""Average pooling minus the input (PoolFormer)."""

from dataclasses import dataclass

from torch import Tensor

from mixlab.core.errors import ConfigError
from mixlab.core.grid import Grid
from mixlab.models.mixers.base import MIXERS, Mixer, StageParts
from mixlab.ops.pool import pool


@dataclass(frozen=True)
class PoolOptions:
    size: int = 3

    def __post_init__(self) -> None:
        if self.size < 1 or self.size % 2 == 0:
            raise ConfigError(f"A pooling window has an odd size of 1 or more; got {self.size}.")


class Pool(Mixer):
    """Each token becomes the mean of its neighbourhood, borders not counted, minus itself."""

    outruns_compilers = True

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        return grid.behind_zeros(pool(grid.image(tokens), Grid(grid.height, grid.width), self.size))


@MIXERS.register("pool", PoolOptions)
def build_stage(options: PoolOptions, dim: int, depth: int, reference_grid: Grid) -> StageParts:
    return StageParts.of(Pool(options.size) for _ in range(depth))
