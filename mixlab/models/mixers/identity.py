"""Identity mapping: no token mixing at all (MetaFormer, Eq. 4)."""

from torch import Tensor

from mixlab.core.choices import NoOptions
from mixlab.core.grid import Grid
from mixlab.models.mixers.base import MIXERS, Mixer, StageParts


class Identity(Mixer):
    outruns_compilers = True

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        return tokens


@MIXERS.register("identity")
def build_stage(options: NoOptions, dim: int, depth: int, reference_grid: Grid) -> StageParts:
    return StageParts.of(Identity() for _ in range(depth))
