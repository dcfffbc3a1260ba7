"""The mean over a window minus its middle (PoolFormer). Tokens: (B, H*W, C)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mixlab.core.grid import Grid
from mixlab.engine.kernels import may_run
from mixlab.engine.kernels.pool import run_pool
from mixlab.ops.written import anywhere, is_as_written, may_train, written_gradients


def pool_reference(tokens: Tensor, grid: Grid, size: int) -> Tensor:
    """What is outside of the image does not count."""
    image = grid.to_map(tokens)
    pooled = F.avg_pool2d(image, size, stride=1, padding=size // 2, count_include_pad=False)
    return grid.from_map(pooled - image)


def pool(tokens: Tensor, grid: Grid, size: int) -> Tensor:
    """`pool_reference` by a kernel where it serves; of tokens without class tokens."""
    if tokens.ndim == 3 and tokens.shape[1] == grid.image_tokens and size % 2:
        if may_run(tokens):
            return run_pool(grid.pixels(tokens.contiguous()), size).flatten(1, 2)
        if may_train(tokens):
            trained: Tensor = PoolGradient.apply(tokens, grid, size)
            return trained
    return pool_reference(tokens, grid, size)


class PoolGradient(torch.autograd.Function):
    """Linear, so that nothing is kept. Its gradient can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, grid: Grid, size: int) -> Tensor:
        ctx.grid, ctx.size = grid, size
        return run_pool(grid.pixels(tokens.contiguous()), size).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        grid, size = ctx.grid, ctx.size
        if is_as_written(gradient):
            place = anywhere(gradient)
            (found,) = written_gradients(lambda x: pool_reference(x, grid, size), [place], [True], gradient)
            return found, None, None
        return run_pool(grid.pixels(gradient.contiguous()), size, back=True).flatten(1, 2), None, None
