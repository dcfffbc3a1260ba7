"""Global random mixing: a frozen random matrix over the tokens (MetaFormer, Eq. 5)."""

import math

import torch
from torch import Tensor, nn

from mixlab.core.choices import NoOptions
from mixlab.core.errors import ImageError, WeightsError
from mixlab.core.grid import Grid
from mixlab.models.mixers.base import MIXERS, Mixer, StageParts
from mixlab.ops.resample import resample_mixing_matrix

MAX_TOKENS = 4096  # the matrix grows with the square: 64 MB here


class RandomMixing(Mixer):
    """The matrix is drawn for the model's own image size and resampled for any other."""

    outruns_compilers = True
    explains = ("matrix",)

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        check_tokens(grid)
        self.grid = Grid(grid.height, grid.width)
        size = grid.image_tokens
        self.matrix = nn.Parameter(torch.rand(size, size).softmax(-1), requires_grad=False)

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        return grid.behind_zeros(self.matrix_for(grid) @ grid.image(tokens))

    def matrix_for(self, grid: Grid) -> Tensor:
        check_tokens(grid)
        return resample_mixing_matrix(self.matrix, self.grid, grid)

    def explain(self, tokens: Tensor, grid: Grid) -> dict[str, Tensor]:
        return {"matrix": self.matrix_for(grid).detach().clone()}

    def resize(self, name: str, value: Tensor, source: Grid | None) -> Tensor:
        source = source or square_grid(value)
        if value.shape != (source.image_tokens, source.image_tokens):
            return value  # not a matrix of that grid: the caller reports its shape
        return resample_mixing_matrix(value, source, self.grid)


def check_tokens(grid: Grid) -> None:
    if grid.image_tokens > MAX_TOKENS:
        raise ImageError(
            f"Random mixing over {grid.height} x {grid.width} = {grid.image_tokens} tokens needs a matrix of "
            f"that number squared; the limit is {MAX_TOKENS} tokens. Use a smaller image, or random mixing only "
            f"in later stages."
        )


def square_grid(matrix: Tensor) -> Grid:
    side = math.isqrt(len(matrix))
    if side * side != len(matrix):
        raise WeightsError(
            f"A random matrix of {len(matrix)} tokens does not belong to a square image, and the file does not "
            f"say which size it was made for. Create the model with that image_size."
        )
    return Grid(side, side)


@MIXERS.register("random")
def build_stage(options: NoOptions, dim: int, depth: int, reference_grid: Grid) -> StageParts:
    return StageParts.of(RandomMixing(reference_grid) for _ in range(depth))
