"""Tokens of several scales, summed on the grid of each (CoaT, section 5.1)."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mixlab.core.grid import Grid
from mixlab.core.guards import is_transformed
from mixlab.engine.kernels import may_run
from mixlab.engine.kernels.resample import resample_tokens
from mixlab.ops.written import anywhere, is_as_written, may_train, written_gradients


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


def exchange(updates: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
    """`exchange_reference` by a kernel where it serves."""
    if is_transformed() or not fits(updates, grids):
        return exchange_reference(updates, grids)
    if may_train(*updates):
        return list(ExchangeGradient.apply(tuple(grids), *updates))
    return summed(updates, grids) if may_run(*updates) else exchange_reference(updates, grids)


def fits(updates: Sequence[Tensor], grids: Sequence[Grid]) -> bool:
    if any(update.ndim != 3 or update.shape[1] != grid.tokens for update, grid in zip(updates, grids, strict=True)):
        return False
    return len({(len(update), update.shape[2], grid.prefix) for update, grid in zip(updates, grids, strict=True)}) == 1


def summed(updates: Sequence[Tensor], grids: Sequence[Grid], *, back: bool = False) -> list[Tensor]:
    """By the kernel. `back`: the gradients of updates from those of the sums."""
    updates, sums = [update.contiguous() for update in updates], []
    for own, here in enumerate(grids):
        out = updates[own].clone()
        for index, there in enumerate(grids):
            if index != own:
                ends = (here, out, there) if back else (there, out, here)
                resample_tokens(updates[index], *ends, back=back, adds=True)
        sums.append(out)
    return sums


class ExchangeGradient(torch.autograd.Function):
    """Linear, so that nothing is kept. Its gradients can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, grids: tuple[Grid, ...], *updates: Tensor) -> tuple[Tensor, ...]:
        ctx.grids = grids
        return tuple(summed(updates, grids))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grids, needed = ctx.grids, ctx.needs_input_grad[1:]
        if is_as_written(*gradients):
            places = [anywhere(one) for one in gradients]
            return None, *written_gradients(lambda *all: exchange_reference(all, grids), places, needed, *gradients)
        found = summed(gradients, grids, back=True)
        return None, *(one if need else None for one, need in zip(found, needed, strict=True))
