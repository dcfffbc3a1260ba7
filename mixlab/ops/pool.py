"""The mean over a window minus its middle (PoolFormer). Tokens: (B, H*W, C)."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from mixlab.core.grid import Grid
from mixlab.ops.operator import Flat, Operator, anywhere, gradients_of


def pool_reference(tokens: Tensor, grid: Sequence[int], size: int) -> Tensor:
    """What is outside of the image does not count."""
    image = Grid(*grid).to_map(tokens)
    pooled = F.avg_pool2d(image, size, stride=1, padding=size // 2, count_include_pad=False)
    return Grid(*grid).from_map(pooled - image)


def pool_gradient(gradients: list[Tensor], inputs: Flat, needed: list[bool], grid: list[int], size: int) -> Flat:
    """Linear, so that it is the same for all tokens."""
    return gradients_of(lambda x: pool_reference(x, grid, size), [anywhere(gradients[0])], [True], gradients)


POOL = Operator(
    "pool",
    pool_reference,
    inputs="Tensor tokens",
    settings="int[] grid, int size",
    gradient=pool_gradient,
    reads=lambda needed, *settings: [False],
)


def pool(tokens: Tensor, grid: Grid, size: int) -> Tensor:
    """`pool_reference` of tokens without class tokens, by a kernel where one serves."""
    return POOL(tokens, grid, size)
