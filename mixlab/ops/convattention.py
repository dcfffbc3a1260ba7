"""Factorised attention (CoaT, Eqs. 2 and 3). Queries, keys and values: (B, N, C), heads side by side in C."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mixlab.core.grid import Grid
from mixlab.engine.kernels import has_wide_vectors, may_run
from mixlab.engine.kernels.depthwise import convolve_channels, taps_gradient
from mixlab.engine.kernels.factor import factor_and_contexts, factor_gradient
from mixlab.ops.depthwise import convolved
from mixlab.ops.written import is_as_written, may_train, written_gradients

WINDOWS = (3, 5, 7)  # rows and columns of kernels whose gradient is our own
NARROW = 12  # channels of a head up to which all heads share one product, most of which is thrown away


def factorised_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, heads: int, *, scaled: bool = True, softmax_query: bool = False
) -> Tensor:
    """phi(Q) (softmax(K)^T V), head by head, as the paper writes it."""
    width = query.shape[-1] // heads
    outputs = []
    for q, k, v in zip(query.split(width, -1), key.split(width, -1), value.split(width, -1), strict=True):
        context = k.softmax(1).transpose(1, 2) @ v  # (B, width, width)
        outputs.append((q.softmax(-1) if softmax_query else q) @ context)
    return torch.cat(outputs, -1) * (width**-0.5 if scaled else 1.0)


def factorised_attention(
    query: Tensor, key: Tensor, value: Tensor, heads: int, *, scaled: bool = True, softmax_query: bool = False
) -> Tensor:
    """`factorised_attention_reference` for all heads at once."""
    width = query.shape[-1] // heads
    scale = width**-0.5 if scaled else 1.0
    if width <= NARROW and not query.is_meta:  # without data it is counted, and what is thrown away does not count
        query = query.unflatten(2, (heads, width)).softmax(-1).flatten(2) if softmax_query else query
        return query @ own_heads(key.softmax(1).mT @ value, heads, scale)
    weights = key.softmax(1).unflatten(2, (heads, width)).permute(0, 2, 3, 1)  # (B, heads, width, N)
    values = value.unflatten(2, (heads, width)).transpose(1, 2)  # (B, heads, N, width)
    context = (weights @ values) * scale  # the smallest tensor here
    queries = query.unflatten(2, (heads, width)).transpose(1, 2)
    queries = queries.softmax(-1) if softmax_query else queries
    return (queries @ context).transpose(1, 2).flatten(2)


def own_heads(context: Tensor, heads: int, scale: float) -> Tensor:
    """(B, C, C) times `scale` where both channels belong to one head, zero elsewhere."""
    head = torch.arange(context.shape[-1], device=context.device) // (context.shape[-1] // heads)
    return (context * scale).masked_fill(head[:, None] != head, 0.0)


def depthwise_in_one(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> Tensor:
    """Depthwise convolutions with kernels of several odd sizes over consecutive channels, padded to the largest."""
    size = max(weight.shape[-1] for weight in weights)
    around = [(size - weight.shape[-1]) // 2 for weight in weights]
    weight = torch.cat([F.pad(one, (edge,) * 4) for one, edge in zip(weights, around, strict=True)])
    known = [bias for bias in biases if bias is not None]
    return convolved(x, weight, torch.cat(known) if known else None, (size // 2, size // 2))


# -- in training: tokens behind class tokens, where they lie -------------------------------------


def may_train_windows(
    tokens: Tensor, grid: Grid, weights: Sequence[Tensor], biases: Sequence[Tensor | None], channels: int
) -> bool:
    """Whether kernels of our own may move these windows over consecutive channels, and learn them."""
    return may_train(tokens, *weights, *biases) and windows_fit(tokens, grid, weights, biases, channels)


def may_run_windows(
    tokens: Tensor, grid: Grid, weights: Sequence[Tensor], biases: Sequence[Tensor | None], channels: int
) -> bool:
    """The same where nothing is learned."""
    return may_run(tokens, *weights, *biases) and windows_fit(tokens, grid, weights, biases, channels)


def windows_fit(
    tokens: Tensor, grid: Grid, weights: Sequence[Tensor], biases: Sequence[Tensor | None], channels: int
) -> bool:
    fits = has_wide_vectors() and tokens.ndim == 3 and tokens.shape[1] == grid.tokens
    fits = fits and sum(map(len, weights)) in (0, channels)
    for weight, bias in zip(weights, biases, strict=True):
        size = weight.shape[-1]
        fits = fits and weight.shape == (len(weight), 1, size, size) and size in WINDOWS and weight.is_contiguous()
        fits = fits and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))
    return fits


def see(
    image: Tensor,
    out: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    turned: bool = False,
    adds: bool = False,
) -> None:
    """Every window over its channels of (B, H, W, C)."""
    widths = [len(weight) for weight in weights]
    parts = zip(image.split(widths, 3), out.split(widths, 3), weights, biases, strict=True)
    for part, place, weight, bias in parts:
        around = weight.shape[-1] // 2
        convolve_channels(part, weight, bias, (around, around), out=place, turned=turned, adds=adds)


def window_gradients(
    image: Tensor, gradient: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Those of the weights and then of the biases, from that of what the windows see."""
    widths, count = [len(weight) for weight in weights], len(weights)
    found: list[Tensor | None] = [None for _ in needed]
    for index, (part, own) in enumerate(zip(image.split(widths, 3), gradient.split(widths, 3), strict=True)):
        if needed[index] or needed[count + index]:
            size = weights[index].shape[-1]
            to_bias = own.new_empty(widths[index]) if needed[count + index] else None
            to_weight = taps_gradient(part, own, (size, size), (size // 2, size // 2), to_bias=to_bias)
            found[index], found[count + index] = to_weight if needed[index] else None, to_bias
    return found


def conv_attention_reference(
    qkv: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    heads: int,
    grid: Grid,
    *,
    scaled: bool = True,
) -> Tensor:
    """Factorised attention of (B, N, 3 C) plus queries times what the windows see of the values (Eq. 10)."""
    query, key, value = qkv.chunk(3, -1)
    mixed = factorised_attention_reference(query, key, value, heads, scaled=scaled)
    if not weights:
        return mixed
    parts = grid.to_map(value).split([len(weight) for weight in weights], 1)
    near = [
        F.conv2d(part, weight, bias, padding=weight.shape[-1] // 2, groups=len(weight))
        for part, weight, bias in zip(parts, weights, biases, strict=True)
    ]
    return mixed + grid.behind_zeros(grid.image(query) * grid.from_map(torch.cat(near, 1)))


def may_train_attention(
    qkv: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], heads: int, grid: Grid
) -> bool:
    """Whether `trained_attention` may compute these."""
    channels = qkv.shape[-1] // 3
    return may_train_windows(qkv, grid, weights, biases, channels) and qkv.shape[-1] % (3 * heads) == 0


def trained_attention(
    qkv: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], heads: int, grid: Grid, *, scaled: bool
) -> Tensor:
    """`conv_attention_reference` by kernels that read and write where queries, keys and values lie side by side."""
    found: Tensor = AttentionGradient.apply(qkv, heads, grid, scaled, *weights, *biases)
    return found


class AttentionGradient(torch.autograd.Function):
    """Its gradients can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, grid: Grid, scaled: bool, *windows: Tensor | None) -> Tensor:
        weights, biases = halves(windows)
        query, key, value = qkv.contiguous().chunk(3, -1)
        near = qkv.new_empty(len(qkv), grid.image_tokens, query.shape[2]) if weights else None
        if near is not None:
            see(grid.pixels(value), grid._replace(prefix=0).pixels(near), weights, biases)
        scale = (query.shape[2] // heads) ** -0.5 if scaled else 1.0
        ctx.about = {"heads": heads, "scale": scale, "prefix": grid.prefix}
        out, contexts = factor_and_contexts(query, key, value, near=near, **ctx.about)
        ctx.grid, ctx.scaled = grid, scaled
        ctx.save_for_backward(qkv, near, contexts, *windows)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (qkv, near, contexts, *windows), grid = ctx.saved_tensors, ctx.grid
        needed = (ctx.needs_input_grad[0], *ctx.needs_input_grad[4:])
        if is_as_written(gradient):

            def written(qkv: Tensor, *windows: Tensor | None) -> Tensor:
                return conv_attention_reference(qkv, *halves(windows), ctx.about["heads"], grid, scaled=ctx.scaled)

            to_qkv, *others = written_gradients(written, (qkv, *windows), needed, gradient)
            return to_qkv, None, None, None, *others
        weights, biases = halves(windows)
        parts = qkv.contiguous().chunk(3, -1)
        to_qkv, to_near = factor_gradient(parts, contexts, gradient.contiguous(), near=near, **ctx.about)
        others = []
        if to_near is not None:
            to_image = grid._replace(prefix=0).pixels(to_near)
            see(to_image, grid.pixels(to_qkv.chunk(3, -1)[2]), weights, [None] * len(weights), turned=True, adds=True)
            others = window_gradients(grid.pixels(parts[2]), to_image, weights, biases, needed[1:])
        return to_qkv if needed[0] else None, None, None, None, *others


def halves(windows: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Weights and biases."""
    return windows[: len(windows) // 2], windows[len(windows) // 2 :]


def conv_position_reference(tokens: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid) -> Tensor:
    """Image tokens plus a depthwise convolution over them; class tokens as they are."""
    seen = F.conv2d(grid.to_map(tokens), weight, bias, padding=weight.shape[-1] // 2, groups=len(weight))
    return tokens + grid.behind_zeros(grid.from_map(seen))


def may_train_position(tokens: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid) -> bool:
    """Whether `trained_position` may compute these."""
    return may_train_windows(tokens, grid, [weight], [bias], tokens.shape[-1])


def trained_position(tokens: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid) -> Tensor:
    """`conv_position_reference` in one pass: the sum is one more at the kernel's centre."""
    found: Tensor = PositionGradient.apply(tokens, weight, bias, grid)
    return found


class PositionGradient(torch.autograd.Function):
    """Its gradients can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid) -> Tensor:
        ctx.save_for_backward(tokens, weight, bias)
        ctx.grid = grid
        return placed(tokens, weight, bias, grid)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (tokens, weight, bias), grid, needed = ctx.saved_tensors, ctx.grid, ctx.needs_input_grad[:3]
        if is_as_written(gradient):

            def written(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
                return conv_position_reference(tokens, weight, bias, grid)

            return *written_gradients(written, (tokens, weight, bias), needed, gradient), None
        images = grid.pixels(tokens), grid.pixels(gradient)
        to_tokens = placed(gradient, weight, None, grid, turned=True) if needed[0] else None
        return to_tokens, *window_gradients(*images, [weight], [bias], needed[1:]), None


def placed(tokens: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid, *, turned: bool = False) -> Tensor:
    """`turned`: the same of a gradient."""
    out = tokens.new_empty(tokens.shape)
    out[:, : grid.prefix] = tokens[:, : grid.prefix]
    see(grid.pixels(tokens), grid.pixels(out), [with_itself(weight.detach())], [bias], turned=turned)
    return out


def with_itself(weight: Tensor) -> Tensor:
    """Kernels that add what is in their middle to what they see: one more at the centre."""
    weight, middle = weight.clone(), weight.shape[-1] // 2
    weight[:, 0, middle, middle] += 1
    return weight
