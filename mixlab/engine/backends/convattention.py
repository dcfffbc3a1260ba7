"""Conv-attention by our own kernels, which read and write where queries, keys and values lie side by side."""

from collections.abc import Sequence

from torch import Tensor

from mixlab.core.grid import Grid
from mixlab.engine.kernels.depthwise import convolve_channels, taps_gradient
from mixlab.engine.kernels.factor import factor_and_contexts, factor_gradient
from mixlab.engine.reasons import needs, why_no_wide_kernel
from mixlab.ops.convattention import CONV_ATTENTION, CONV_POSITION, halves
from mixlab.ops.operator import Backend, Flat, TrainingBackend

WINDOWS = (3, 5, 7)  # rows and columns of kernels whose gradient is our own
Weights = Sequence[Tensor]
Biases = Sequence[Tensor | None]


# -- windows over consecutive channels -----------------------------------------------------------


def why_not_windows(tokens: Tensor, grid: Grid, weights: Weights, biases: Biases, channels: int) -> str | None:
    """None if our kernels may move these windows over the image tokens, else the reason why not."""
    reason = why_no_wide_kernel(tokens, *weights, *biases)
    if reason:
        return reason
    fits = tokens.ndim == 3 and tokens.shape[1] == grid.tokens and sum(map(len, weights)) in (0, channels)
    known = True
    for weight, bias in zip(weights, biases, strict=True):
        size = weight.shape[-1]
        known = known and size in WINDOWS and weight.shape == (len(weight), 1, size, size)
        fits = fits and weight.is_contiguous()
        fits = fits and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))
    return needs(known, f"windows of other sizes than {WINDOWS}") or needs(fits, "windows that do not fit the tokens")


def see(
    image: Tensor, out: Tensor, weights: Weights, biases: Biases, *, turned: bool = False, adds: bool = False
) -> None:
    """Every window over its channels of (B, H, W, C)."""
    widths = [len(weight) for weight in weights]
    parts = zip(image.split(widths, 3), out.split(widths, 3), weights, biases, strict=True)
    for part, place, weight, bias in parts:
        around = weight.shape[-1] // 2
        convolve_channels(part, weight, bias, (around, around), out=place, turned=turned, adds=adds)


def window_gradients(
    image: Tensor, gradient: Tensor, weights: Weights, biases: Biases, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Those of the weights and then of the biases, from that of what the windows see."""
    widths, count = [len(weight) for weight in weights], len(weights)
    gradients: list[Tensor | None] = [None for _ in needed]
    for index, (part, own) in enumerate(zip(image.split(widths, 3), gradient.split(widths, 3), strict=True)):
        if needed[index] or needed[count + index]:
            size = weights[index].shape[-1]
            to_bias = own.new_empty(widths[index]) if needed[count + index] else None
            to_weight = taps_gradient(part, own, (size, size), (size // 2, size // 2), to_bias=to_bias)
            gradients[index], gradients[count + index] = to_weight if needed[index] else None, to_bias
    return gradients


# -- attention -----------------------------------------------------------------------------------


def supports(
    qkv: Tensor, windows: Biases, heads: int, grid: Sequence[int], scaled: bool, softmax_query: bool
) -> str | None:
    return (
        needs(not softmax_query, "a softmax over queries")
        or needs(qkv.ndim == 3 and qkv.shape[2] % (3 * heads) == 0, "heads that do not divide the channels")
        or why_not_windows(qkv, Grid(*grid), *halves(windows), qkv.shape[2] // 3)
    )


def train(
    qkv: Tensor, windows: Biases, heads: int, sizes: Sequence[int], scaled: bool, softmax_query: bool
) -> tuple[Tensor, list[Tensor]]:
    grid, (weights, biases) = Grid(*sizes), halves(windows)
    query, key, value = qkv.contiguous().chunk(3, -1)
    near = qkv.new_empty(len(qkv), grid.image_tokens, query.shape[2]) if weights else None
    if near is not None:
        see(grid.pixels(value), grid._replace(prefix=0).pixels(near), weights, biases)
    out, contexts = factor_and_contexts(
        query, key, value, heads, near=near, scale=scale_of(qkv, heads, scaled), prefix=grid.prefix
    )
    return out, [contexts] if near is None else [contexts, near]


def run(qkv: Tensor, windows: Biases, heads: int, sizes: Sequence[int], scaled: bool, softmax_query: bool) -> Tensor:
    return train(qkv, windows, heads, sizes, scaled, softmax_query)[0]


def gradient(
    gradients: list[Tensor],
    inputs: Flat,
    saved: list[Tensor],
    needed: list[bool],
    heads: int,
    sizes: Sequence[int],
    scaled: bool,
    softmax_query: bool,
) -> Flat:
    (qkv, *windows), (contexts, *rest), grid = inputs, saved, Grid(*sizes)
    assert qkv is not None
    (weights, biases), near = halves(windows), rest[0] if rest else None
    query, key, value = qkv.contiguous().chunk(3, -1)
    parts, gradient, scale = (query, key, value), gradients[0].contiguous(), scale_of(qkv, heads, scaled)
    to_qkv, to_near = factor_gradient(parts, contexts, gradient, heads, scale=scale, near=near, prefix=grid.prefix)
    if to_near is None:
        return [to_qkv]
    to_image = grid._replace(prefix=0).pixels(to_near)
    see(to_image, grid.pixels(to_qkv.chunk(3, -1)[2]), weights, [None] * len(weights), turned=True, adds=True)
    return [to_qkv, *window_gradients(grid.pixels(value), to_image, weights, biases, needed[1:])]


def scale_of(qkv: Tensor, heads: int, scaled: bool) -> float:
    return (qkv.shape[2] // (3 * heads)) ** -0.5 if scaled else 1.0


CONV_ATTENTION.serve(Backend("kernel", supports, run))
CONV_ATTENTION.train(TrainingBackend("kernel", supports, train, gradient))


# -- the encoding of absolute positions ----------------------------------------------------------


def supports_position(tokens: Tensor, weight: Tensor, bias: Tensor | None, grid: Sequence[int]) -> str | None:
    return needs(tokens.ndim == 3, "no tokens (B, N, C)") or why_not_windows(
        tokens, Grid(*grid), [weight], [bias], tokens.shape[2]
    )


def add_position(
    tokens: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int], *, turned: bool = False
) -> Tensor:
    """In one pass: the sum is one more at the kernel's center. `turned`: the same of a gradient."""
    out, grid = tokens.new_empty(tokens.shape), Grid(*sizes)
    out[:, : grid.prefix] = tokens[:, : grid.prefix]
    see(grid.pixels(tokens), grid.pixels(out), [with_itself(weight.detach())], [bias], turned=turned)
    return out


def with_itself(weight: Tensor) -> Tensor:
    """Kernels that add what is in their middle to what they see: one more at the center."""
    weight, middle = weight.clone(), weight.shape[-1] // 2
    weight[:, 0, middle, middle] += 1
    return weight


def train_position(
    tokens: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]
) -> tuple[Tensor, list[Tensor]]:
    return add_position(tokens, weight, bias, sizes), []


def position_gradient(
    gradients: list[Tensor], inputs: Flat, saved: list[Tensor], needed: list[bool], sizes: Sequence[int]
) -> Flat:
    (gradient,), (tokens, weight, bias), grid = gradients, inputs, Grid(*sizes)
    assert tokens is not None
    assert weight is not None
    to_tokens = add_position(gradient, weight, None, sizes, turned=True) if needed[0] else None
    images = grid.pixels(tokens), grid.pixels(gradient)
    return [to_tokens, *window_gradients(*images, [weight], [bias], needed[1:])]


CONV_POSITION.serve(Backend("kernel", supports_position, add_position))
CONV_POSITION.train(TrainingBackend("kernel", supports_position, train_position, position_gradient))
