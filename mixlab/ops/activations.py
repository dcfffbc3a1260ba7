"""Elementwise functions behind linear layers; StarReLU (MetaFormer, Eq. 15) in few passes over memory."""

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mixlab.core.errors import ConfigError
from mixlab.ops.operator import Flat, Operator, TrainingBackend

ActivationName = Literal["none", "gelu", "relu", "silu", "squared_relu", "star_relu"]


def star_relu_reference(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """scale * relu(x)^2 + shift, as the paper writes it."""
    return scale * torch.relu(x) ** 2 + shift


def written_square(x: Tensor) -> Tensor:
    """relu(x)^2; of float16, where 256 squared is infinite, in float32."""
    return torch.relu(x.float() if x.dtype is torch.float16 else x).square()


def written_star(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """StarReLU with the scale and the shift in one pass."""
    return torch.addcmul(shift, squared_relu(x), scale).to(x.dtype)


# These gradients read the input alone, where autograd would keep every step. They serve all devices, and that without
# data, on which memory is counted.
DEVICES = ("CPU", "CUDA", "MPS", "XPU", "Meta")
SQUARED_RELU = Operator(
    "squared_relu", written_square, inputs="Tensor x", devices=DEVICES, autocasts=False, kernels_only=False
)
STAR_RELU = Operator(
    "star_relu",
    written_star,
    inputs="Tensor x, Tensor scale, Tensor shift",
    devices=DEVICES,
    autocasts=False,
    kernels_only=False,
)


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2, in float32 if x is float16."""
    return SQUARED_RELU(x)


def star_relu(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`star_relu_reference` in few passes."""
    return STAR_RELU(x, scale, shift)


def activate(x: Tensor, activation: ActivationName, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
    """The activation of this name; StarReLU has a scale and a shift."""
    if activation == "star_relu":
        assert scale is not None
        assert shift is not None
        return star_relu(x, scale, shift)
    return FUNCTIONS[activation](x)


FUNCTIONS: dict[ActivationName, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "squared_relu": lambda x: squared_relu(x).to(x.dtype),
}


# -- gradients -----------------------------------------------------------------------------------


def supports_square(x: Tensor) -> str | None:
    return "float16 is squared in float32" if x.dtype is torch.float16 else None


def train_square(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    return torch.relu(x).square_(), []


def square_gradient(gradients: list[Tensor], inputs: Flat, saved: list[Tensor], needed: list[bool]) -> Flat:
    (x,) = inputs
    assert x is not None
    return [(gradients[0] * torch.relu(x)).mul_(2)]


def supports_star(x: Tensor, scale: Tensor, shift: Tensor) -> str | None:
    if not scale.numel() == shift.numel() == 1:
        return "a scale and a shift per channel"
    same = x.dtype is scale.dtype is shift.dtype and x.dtype is not torch.float16
    return None if same else "numbers of several kinds, or float16"


def train_star(x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, list[Tensor]]:
    return torch.relu(x).square_().mul_(scale).add_(shift), []


def star_gradient(gradients: list[Tensor], inputs: Flat, saved: list[Tensor], needed: list[bool]) -> Flat:
    (gradient,), (x, scale, shift) = gradients, inputs
    assert x is not None
    assert scale is not None
    assert shift is not None
    kept = torch.relu(x)
    product = gradient * kept
    to_scale = torch.dot(product.reshape(-1), kept.reshape(-1)).view_as(scale)
    return [product.mul_(2 * scale), to_scale, gradient.sum().view_as(shift)]


SQUARED_RELU.train(TrainingBackend("input", supports_square, train_square, square_gradient))
STAR_RELU.train(TrainingBackend("input", supports_star, train_star, star_gradient))


# -- the constants of the paper ------------------------------------------------------------------


def star_relu_constants(mean: float = 0.0, variance: float = 1.0) -> tuple[float, float]:
    """The scale and bias with which StarReLU of normally distributed inputs has mean 0 and variance 1.

    For a standard normal distribution these are 0.8944 and -0.4472 (MetaFormer, Eqs. 11 and 14).
    """
    if not (math.isfinite(mean) and 0 < variance < math.inf):
        raise ConfigError(f"StarReLU's constants need a finite mean and a variance above 0; got {mean}, {variance}.")
    deviation = math.sqrt(variance)
    ratio = mean / deviation
    positive = 0.5 * math.erfc(-ratio / math.sqrt(2))  # how often an input is above 0
    density = math.exp(-0.5 * ratio**2) / math.sqrt(2 * math.pi)
    second = (mean**2 + variance) * positive + mean * deviation * density  # E relu(x)^2
    fourth = (mean**4 + 6 * mean**2 * variance + 3 * variance**2) * positive
    fourth += (mean**3 * deviation + 5 * mean * deviation**3) * density  # E relu(x)^4
    spread = math.sqrt(fourth - second**2)
    return 1 / spread, -second / spread
