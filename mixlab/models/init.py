"""Draw fresh weights. A module that sets `initializes_itself` is left as it made itself."""

from collections.abc import Callable

import torch
from torch import nn

from mixlab.core.errors import ConfigError, near_misses
from mixlab.models.heads import Head
from mixlab.models.layers import Mlp
from mixlab.models.stems import Downsample

Layer = nn.Linear | nn.Conv1d | nn.Conv2d
TRUNCATED_STD = 0.8796  # of a standard normal that is cut at two standard deviations


def truncated_normal(layer: Layer, parent: nn.Module | None) -> None:
    """Std 0.02, biases 0 (MetaFormer, HyenaPixel)."""
    nn.init.trunc_normal_(layer.weight, std=0.02)
    zero_bias(layer)


def truncated_normal_linear(layer: Layer, parent: nn.Module | None) -> None:
    """Linear layers as in `truncated_normal`; convolutions as PyTorch draws them (CoaT)."""
    if isinstance(layer, nn.Linear):
        truncated_normal(layer, parent)


def xavier_lecun(layer: Layer, parent: nn.Module | None) -> None:
    """Linear layers Xavier uniform, convolutions LeCun normal, MLP biases tiny, the classifier zero (Sequencer)."""
    zero_bias(layer)
    if isinstance(parent, Head) and layer is parent.classifier:
        nn.init.zeros_(layer.weight)
    elif isinstance(layer, nn.Linear):
        nn.init.xavier_uniform_(layer.weight)
    else:
        std = layer.weight[0].numel() ** -0.5 / TRUNCATED_STD
        nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
    if isinstance(parent, Mlp) and layer.bias is not None:
        nn.init.normal_(layer.bias, std=1e-6)


def vision_lstm(layer: Layer, parent: nn.Module | None) -> None:
    """The patch embedding Xavier uniform, the classifier nearly zero, all else as MetaFormer; mLSTM draws its own."""
    truncated_normal(layer, parent)
    if isinstance(parent, Downsample):
        flat = nn.init.xavier_uniform_(torch.empty_like(layer.weight.flatten(1)))
        with torch.no_grad():
            layer.weight.copy_(flat.view_as(layer.weight))
    elif isinstance(parent, Head) and layer is parent.classifier:
        nn.init.trunc_normal_(layer.weight, std=2e-5)


def zero_bias(layer: Layer) -> None:
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


SCHEMES: dict[str, Callable[[Layer, nn.Module | None], None]] = {
    "truncated_normal": truncated_normal,
    "truncated_normal_linear": truncated_normal_linear,
    "xavier_lecun": xavier_lecun,
    "vision_lstm": vision_lstm,
}


def initialize(module: nn.Module, scheme: str, parent: nn.Module | None = None) -> None:
    """Apply a scheme to the linear layers and convolutions of a module."""
    if scheme not in SCHEMES:
        raise ConfigError(f"Unknown init {scheme!r}. {near_misses(scheme, SCHEMES)}")
    if any(getattr(module, name, False) for name in ("initializes_itself", "initialises_itself")):  # the older name
        return
    if isinstance(module, Layer):
        SCHEMES[scheme](module, parent)
    for child in module.children():
        initialize(child, scheme, module)


initialise = initialize  # the name until 0.1.0
