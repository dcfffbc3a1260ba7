"""Layers of PyTorch through operators. A layer that was replaced, or that somebody listens to, is called as it is."""

from collections.abc import Callable
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from mixlab.core.compat import listened_to, onednn_packed
from mixlab.ops.activations import ActivationName
from mixlab.ops.linear import linear
from mixlab.ops.mlp import mlp
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


class Elementwise(Protocol):
    """An activation that may have a name in `mixlab.ops.activations`, and then two factors."""

    operation: ActivationName | None

    def factors(self) -> tuple[Tensor | None, Tensor | None]: ...

    def __call__(self, x: Tensor) -> Tensor: ...


def bare(layer: Any, *kinds: type) -> bool:
    """Whether a layer is exactly of one of these kinds and nobody listens to its call."""
    return type(layer) in kinds and not listened_to(layer)


def named(act: Any) -> bool:
    """Whether an activation is no more than its name says."""
    return act.operation is not None and not listened_to(act)


def through(layer: Any, x: Tensor) -> Tensor:
    """layer(x), a linear layer by `mixlab.ops.linear`."""
    return linear(x, layer.weight, layer.bias) if bare(layer, nn.Linear, PackedLinear) else layer(x)


def through_both(layer: Any, act: Elementwise, x: Tensor) -> Tensor:
    """act(layer(x)), in one operator where it can be."""
    if bare(layer, nn.Linear, PackedLinear) and named(act) and act.operation is not None:
        return linear(x, layer.weight, layer.bias, act.operation, *act.factors())
    return act(through(layer, x))


def through_mlp(first: Any, act: Elementwise, second: Any, x: Tensor) -> Tensor:
    """second(act(first(x))), in one operator where it can be."""
    layers = bare(first, nn.Linear, PackedLinear) and bare(second, nn.Linear, PackedLinear)
    if layers and named(act) and act.operation is not None:
        return mlp(x, first.weight, first.bias, second.weight, second.bias, act.operation, *act.factors())
    return through(second, through_both(first, act, x))


def normed(norm: Any, x: Tensor, factor: Tensor | None = None) -> Tensor:
    """norm(x), or norm(x * factor), of channels on the last axis."""
    if bare(norm, nn.LayerNorm) and len(norm.normalized_shape) == 1:
        return layer_norm(x, norm.weight, norm.bias, norm.eps, factor=factor)
    return norm(x if factor is None else x * factor)


def through_conv(conv: Any, image: Tensor, weight: Callable[[], Tensor]) -> Tensor:
    """conv(image) with a kernel that may be laid out in another way than the layer's own."""
    if not bare(conv, nn.Conv2d) or conv.padding_mode != "zeros":
        return conv(image)
    return F.conv2d(image, weight(), conv.bias, conv.stride, conv.padding, conv.dilation, conv.groups)
