"""Layers of PyTorch through operators. A layer that was replaced, or that somebody listens to, is called as it is."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixlab.core.compat import listened_to, onednn_packed
from mixlab.core.grid import Grid
from mixlab.ops.convattention import add_seen, conv_attention, conv_position, factorised_attention
from mixlab.ops.depthwise import depthwise
from mixlab.ops.linear import linear
from mixlab.ops.mlp import mlp
from mixlab.ops.mlstm_layer import CellWeights, Form, head_norm, mlstm_cell, mlstm_layer
from mixlab.ops.norms import layer_norm


class PackedLinear(nn.Linear):
    """A linear layer for inference, its weight in the order in which oneDNN reads it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        del self.weight
        self.weight = onednn_packed(layer.weight)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class DepthwiseConv(nn.Conv2d):
    """One odd kernel per channel; the map keeps its size."""

    def __init__(self, channels: int, kernel: int | tuple[int, int], *, bias: bool) -> None:
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (height // 2, width // 2)
        super().__init__(channels, channels, (height, width), padding=padding, groups=channels, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        height, width = self.kernel_size
        return depthwise(x, self.weight, self.bias, (height // 2, width // 2))


class HeadNorm(nn.Module):
    """A layer norm within each head, with a weight and bias per channel: (heads, B, T, D) in, (B, T, C) out."""

    def __init__(self, channels: int, heads: int, *, bias: bool, eps: float = 1e-5) -> None:
        super().__init__()
        self.heads, self.eps = heads, eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def forward(self, heads: Tensor) -> Tensor:
        return head_norm(heads, self.weight, self.bias, self.eps)


def bare(layer: Any, *kinds: type) -> bool:
    """Whether a layer is exactly of one of these kinds and nobody listens to its call."""
    return type(layer) in kinds and not listened_to(layer)


def named(act: Any) -> bool:
    """Whether an activation is no more than `operation` says: its name in `mixlab.ops.activations`."""
    return getattr(act, "operation", None) is not None and not listened_to(act)


def through(layer: Any, x: Tensor) -> Tensor:
    """layer(x), a linear layer by `mixlab.ops.linear`."""
    return linear(x, layer.weight, layer.bias) if bare(layer, nn.Linear, PackedLinear) else layer(x)


def through_both(layer: Any, act: Any, x: Tensor) -> Tensor:
    """act(layer(x)), in one operator where it can be."""
    if bare(layer, nn.Linear, PackedLinear) and named(act):
        return linear(x, layer.weight, layer.bias, act.operation, *act.factors())
    return act(through(layer, x))


def through_mlp(first: Any, act: Any, second: Any, x: Tensor) -> Tensor:
    """second(act(first(x))), in one operator where it can be."""
    layers = bare(first, nn.Linear, PackedLinear) and bare(second, nn.Linear, PackedLinear)
    if layers and named(act):
        return mlp(x, first.weight, first.bias, second.weight, second.bias, act.operation, *act.factors())
    return through(second, through_both(first, act, x))


def normed(norm: Any, x: Tensor, factor: Tensor | None = None) -> Tensor:
    """norm(x), or norm(x * factor), of channels on the last axis."""
    if not torch.is_grad_enabled() and bare(norm, nn.LayerNorm) and len(norm.normalized_shape) == 1:
        return layer_norm(x, norm.weight, norm.bias, norm.eps, factor=factor)
    return norm(x if factor is None else x * factor)


def through_conv(conv: Any, image: Tensor, weight: Callable[[], Tensor]) -> Tensor:
    """conv(image) with a kernel that may be laid out in another way than the layer's own."""
    if not bare(conv, nn.Conv2d) or conv.padding_mode != "zeros":
        return conv(image)
    return F.conv2d(image, weight(), conv.bias, conv.stride, conv.padding, conv.dilation, conv.groups)


def positioned(conv: Any, tokens: Tensor, grid: Grid) -> Tensor:
    """Image tokens plus a depthwise convolution over them; class tokens as they are."""
    if bare(conv, DepthwiseConv):
        return conv_position(tokens, conv.weight, conv.bias, grid)
    image = grid.image(tokens) + grid.from_map(conv(grid.to_map(tokens)))
    return torch.cat([tokens[:, : grid.prefix], image], 1) if grid.prefix else image


def through_attention(
    qkv: Tensor, encoding: Any, heads: int, grid: Grid, *, scaled: bool, softmax_query: bool
) -> Tensor:
    """Factorised attention plus queries times an encoding of relative positions, if there is one: a module whose
    `convs` see consecutive channels of the values.
    """
    form = {"scaled": scaled, "softmax_query": softmax_query}
    convs = [] if encoding is None else list(encoding.convs)
    if all(bare(conv, DepthwiseConv) for conv in convs) and not (encoding is not None and listened_to(encoding)):
        return conv_attention(qkv, [conv.weight for conv in convs], [conv.bias for conv in convs], heads, grid, **form)
    query, key, value = qkv.chunk(3, -1)
    mixed = factorised_attention(query, key, value, heads, **form)
    return add_seen(mixed, query, encoding(value, grid), grid)


def through_mlstm(
    source: Tensor,
    values: Tensor,
    gate: Tensor,
    cell: CellWeights,
    norm: Any,
    skip: Tensor,
    *,
    form: Form,
    chunk: int | None,
) -> Tensor:
    """(norm(cell) + skip * source) * silu(gate)"""
    if bare(norm, HeadNorm):
        about = {"norm_eps": norm.eps, "form": form, "chunk": chunk}
        return mlstm_layer(source, values, gate, cell, (norm.weight, norm.bias), skip, **about)
    mixed = norm(mlstm_cell(source, values, cell, form, chunk))
    return torch.addcmul(mixed, source, skip) * F.silu(gate)
