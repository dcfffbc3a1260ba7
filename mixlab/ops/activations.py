"""StarReLU (MetaFormer, Eq. 15) in as few passes over memory as eager mode allows."""

import torch
import torch.nn.functional as F
from torch import Tensor


def star_relu_reference(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """scale * relu(x)^2 + bias, as the paper writes it."""
    return scale * torch.relu(x) ** 2 + bias


def squared_relu(x: Tensor, *, overwrite: bool = False) -> Tensor:
    """relu(x)^2. `overwrite` lets it use x's memory, which only a caller that owns x may allow."""
    if x.dtype is torch.float16:  # 256 squared is infinite there
        return torch.relu(x.float()).square()
    return x.relu_().square_() if overwrite else torch.relu(x).square()


def star_relu(x: Tensor, scale: Tensor, bias: Tensor, *, overwrite: bool = False) -> Tensor:
    """`star_relu_reference` with the scale and the bias in one pass."""
    return torch.addcmul(bias, squared_relu(x, overwrite=overwrite), scale).to(x.dtype)


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
        return F.linear(star_relu(x, scale, bias, overwrite=overwrite), weight, offset)
    shift = bias * weight.sum(1)
    shift = shift if offset is None else shift + offset
    return F.linear(squared_relu(x, overwrite=overwrite).to(x.dtype), weight * scale, shift)
