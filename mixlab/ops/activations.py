"""StarReLU (MetaFormer, Eq. 15) in as few passes over memory as eager mode allows."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mixlab.core.errors import ConfigError
from mixlab.core.guards import is_many, is_transformed
from mixlab.engine.kernels.linear import run_linear, run_star
from mixlab.ops.linear import is_fast, is_own_product, is_plain_float, layer_gradients, linear, needs_gradient, product
from mixlab.ops.written import written_gradients


def star_relu_reference(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """scale * relu(x)^2 + bias, as the paper writes it."""
    return scale * torch.relu(x) ** 2 + bias


def squared_relu(x: Tensor, *, overwrite: bool = False) -> Tensor:
    """relu(x)^2. `overwrite` lets it use x's memory, which only a caller that owns x may allow."""
    if x.dtype is torch.float16:  # 256 squared is infinite there
        return torch.relu(x.float()).square()
    if is_trained(x):
        squared: Tensor = SquaredReLUGradient.apply(x)
        return squared
    kept = x.relu_() if overwrite else torch.relu(x)
    return kept.square() if torch.is_grad_enabled() else kept.square_()


def star_relu(x: Tensor, scale: Tensor, bias: Tensor, *, overwrite: bool = False) -> Tensor:
    """`star_relu_reference` with the scale and the bias in one pass."""
    single = scale.numel() == bias.numel() == 1
    if single and is_trained(x) and x.dtype is scale.dtype is bias.dtype is not torch.float16:
        result: Tensor = StarReLUGradient.apply(x, scale, bias)
        return result
    squared = squared_relu(x, overwrite=overwrite)
    if squared.dtype is scale.dtype is bias.dtype and not torch.is_grad_enabled():
        return squared.mul_(scale).add_(bias).to(x.dtype)
    return torch.addcmul(bias, squared, scale).to(x.dtype)


def is_trained(x: Tensor) -> bool:
    """Whether gradients will be asked for that were not written by a compiler."""
    return torch.is_grad_enabled() and x.requires_grad and not is_transformed()


class SquaredReLUGradient(torch.autograd.Function):
    """relu(x)^2, whose gradient is 2 relu(x); that can be differentiated again."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.relu(x).square_()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        kept = torch.relu(*ctx.saved_tensors)
        return 2 * kept * gradient if torch.is_grad_enabled() else (gradient * kept).mul_(2)


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


class StarReLUGradient(torch.autograd.Function):
    """scale * relu(x)^2 + bias of one scale and one bias; its gradients can be differentiated again."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        return torch.relu(x).square_().mul_(scale).add_(bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, scale, bias = ctx.saved_tensors
        kept = torch.relu(x)
        product = gradient * kept
        to_scale = torch.dot(product.reshape(-1), kept.reshape(-1)).view_as(scale)
        to_x = product * (2 * scale) if torch.is_grad_enabled() else product.mul_(2 * scale)
        return to_x, to_scale, gradient.sum().view_as(bias)


def linear_star_relu(x: Tensor, weight: Tensor, offset: Tensor | None, scale: Tensor, bias: Tensor) -> Tensor:
    """StarReLU behind a linear layer, with gradients, for what `may_join_star` allows."""
    found: Tensor = LinearStarGradient.apply(x, weight, offset, scale, bias)
    return found


def may_join_star(x: Tensor, weight: Tensor, offset: Tensor | None, scale: Tensor, bias: Tensor) -> bool:
    """Whether our own kernels may compute both, and a gradient is wanted."""
    if not (torch.is_grad_enabled() and scale.numel() == bias.numel() == 1 and needs_gradient(x, weight)):
        return False
    return (
        is_fast(x, weight, offset)
        and is_plain_float(scale)
        and is_plain_float(bias)
        and is_own_product(x, weight, offset)
    )


class LinearStarGradient(torch.autograd.Function):
    """scale * relu(x W^T + b)^2 + bias; keeps the ReLU. Its gradients can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offset: Tensor | None, scale: Tensor, bias: Tensor) -> Tensor:
        kept, then = x.new_empty(*x.shape[:-1], len(weight)), (scale.item(), bias.item())
        ctx.save_for_backward(x, weight, offset, scale, bias, kept)
        return run_linear(x, weight, offset, "and_relu", then, aside=kept)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, offset, scale, bias, kept = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if torch.is_grad_enabled() or is_many(gradient) or not is_fast(gradient, weight.t()):  # as it is written

            def written(x: Tensor, weight: Tensor, offset: Tensor | None, scale: Tensor, bias: Tensor) -> Tensor:
                return star_relu_reference(F.linear(x, weight, offset), scale, bias)

            return tuple(written_gradients(written, (x, weight, offset, scale, bias), needed, gradient))
        to_hidden, to_scale, to_bias = run_star(gradient.contiguous(), kept, 2 * scale.item())
        rows = x.reshape(-1, x.shape[-1]) if needed[1] else None
        return (
            product(to_hidden, weight.t()) if needed[0] else None,
            *layer_gradients(to_hidden.flatten(0, -2), rows, bias=needed[2]),
            to_scale.view_as(scale),
            to_bias.view_as(bias),
        )


def star_relu_linear_reference(x: Tensor, scale: Tensor, bias: Tensor, weight: Tensor, offset: Tensor | None) -> Tensor:
    """A linear layer after StarReLU, one after the other."""
    return F.linear(star_relu_reference(x, scale, bias), weight, offset)


def star_relu_linear(
    x: Tensor, scale: Tensor, bias: Tensor, weight: Tensor, offset: Tensor | None, *, overwrite: bool = False
) -> Tensor:
    """`star_relu_linear_reference` with the scale and the bias moved into the layer where that is less work.

    W (s r^2 + b) = (s W) r^2 + b W 1: the weights are touched instead of the activations, so it pays
    when there are more activations than weights. A compiler fuses the plain form better than this one.
    """
    if torch.compiler.is_compiling() or x.dtype is torch.float16 or x.numel() <= 2 * weight.numel():
        return linear(star_relu(x, scale, bias, overwrite=overwrite), weight, offset)
    shift = bias * weight.sum(1)
    shift = shift if offset is None else shift + offset
    return linear(squared_relu(x, overwrite=overwrite).to(x.dtype), weight * scale, shift)
