"""Pooling, the exchange between scales and norms by our own kernels."""

from collections.abc import Sequence

from torch import Tensor

from mixlab.core.grid import Grid
from mixlab.engine.kernels.norm import Norm, fits, norm_of_product
from mixlab.engine.kernels.pool import run_pool, run_whole_norm
from mixlab.engine.kernels.resample import resample_tokens
from mixlab.engine.reasons import needs, vectors_fit, why_no_kernel
from mixlab.ops.exchange import EXCHANGE, grids_of
from mixlab.ops.norms import GLOBAL_NORM, LAYER_NORM
from mixlab.ops.operator import Backend, Flat, TrainingBackend
from mixlab.ops.pool import POOL

# -- pooling -------------------------------------------------------------------------------------


def supports_pool(tokens: Tensor, grid: Sequence[int], size: int) -> str | None:
    return (
        why_no_kernel(tokens)
        or needs(tokens.ndim == 3 and tokens.shape[1] == grid[0] * grid[1], "tokens are not those of the grid")
        or needs(size % 2 == 1, "a window of even size")
    )


def pool(tokens: Tensor, grid: Sequence[int], size: int) -> Tensor:
    return run_pool(Grid(*grid).pixels(tokens.contiguous()), size).flatten(1, 2)


def train_pool(tokens: Tensor, grid: Sequence[int], size: int) -> tuple[Tensor, list[Tensor]]:
    return pool(tokens, grid, size), []


def pool_gradient(
    gradients: list[Tensor], inputs: Flat, saved: list[Tensor], needed: list[bool], grid: list[int], size: int
) -> Flat:
    return [run_pool(Grid(*grid).pixels(gradients[0].contiguous()), size, back=True).flatten(1, 2)]


POOL.serve(Backend("kernel", supports_pool, pool))
POOL.train(TrainingBackend("kernel", supports_pool, train_pool, pool_gradient))


# -- the exchange between scales -----------------------------------------------------------------


def supports_exchange(updates: Sequence[Tensor], sizes: Sequence[int]) -> str | None:
    reason = why_no_kernel(*updates)
    if reason:
        return reason
    pairs = list(zip(updates, grids_of(sizes), strict=True))
    if any(update.ndim != 3 or update.shape[1] != grid.tokens for update, grid in pairs):
        return "tokens are not those of the grids"
    alike = len({(len(update), update.shape[2], grid.prefix) for update, grid in pairs}) == 1
    return needs(alike, "scales differ in images, channels or class tokens")


def exchange(updates: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    return summed(updates, grids_of(sizes), back=False)


def train_exchange(updates: Sequence[Tensor], sizes: Sequence[int]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    return tuple(exchange(updates, sizes)), []


def exchange_gradient(
    gradients: list[Tensor], inputs: Flat, saved: list[Tensor], needed: list[bool], sizes: list[int]
) -> Flat:
    return summed(gradients, grids_of(sizes), back=True)


def summed(updates: Sequence[Tensor], grids: Sequence[Grid], *, back: bool) -> list[Tensor]:
    """On every grid the sum of all that is moved there; `back`: the gradients of updates from those of the sums."""
    updates, sums = [update.contiguous() for update in updates], []
    for own, here in enumerate(grids):
        out = updates[own].clone()
        for index, there in enumerate(grids):
            if index != own:
                ends = (here, out, there) if back else (there, out, here)
                resample_tokens(updates[index], *ends, back=back, adds=True)
        sums.append(out)
    return sums


EXCHANGE.serve(Backend("kernel", supports_exchange, exchange))
EXCHANGE.train(TrainingBackend("kernel", supports_exchange, train_exchange, exchange_gradient))


# -- norms ---------------------------------------------------------------------------------------


def supports_layer_norm(
    x: Tensor, factor: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> str | None:
    given = (x,) if factor is None else (x, factor)
    return (
        why_no_kernel(x, factor, weight, bias)
        or needs(weight is not None, "a norm without weights")
        or needs(x.ndim > 2 and vectors_fit(x.shape[-1:], weight, bias), "weights of another shape than the channels")
        or needs(fits(*(part.flatten(1, -2) for part in given)), "tokens that do not lie row by row")
    )


def layer_norm(x: Tensor, factor: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    other = None if factor is None else factor.flatten(1, -2)
    return norm_of_product(x.flatten(1, -2), other, Norm(weight, bias, eps)).view(x.shape)


def supports_global_norm(tokens: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> str | None:
    return (
        why_no_kernel(tokens, weight, bias)
        or needs(weight is not None, "a norm without weights")
        or needs(tokens.ndim == 3 and tokens.is_contiguous(), "tokens that do not lie row by row")
        or needs(vectors_fit(tokens.shape[2:], weight, bias), "weights of another shape than the channels")
    )


def global_norm(tokens: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return run_whole_norm(tokens, Norm(weight, bias, eps))


LAYER_NORM.serve(Backend("kernel", supports_layer_norm, layer_norm))
GLOBAL_NORM.serve(Backend("kernel", supports_global_norm, global_norm))
