"""Linear layers on a CPU: oneDNN's product instead of the BLAS's, in inference with the activation in the same pass.

On the machine of the performance notes it reaches 85 to 105 billion multiply-accumulates per second where `F.linear`
reaches 55 to 95, most where there are few rows. Whatever else follows the arithmetic (a compiler, a tracer, autocast,
counters) gets `F.linear`.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixlab.guards import is_transformed

After = Literal["none", "relu", "gelu"]
LEAST = 16  # outputs of a layer from which training it takes the fast way
IN_CACHE = 5 * 2**19  # bytes of an intermediate result that caches of two cores hold


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, after: After = "none") -> Tensor:
    """`linear_reference` by the fastest way for what is given."""
    if is_plain_inference(x, weight, bias):
        return product(x, weight, bias, after)
    if torch.is_grad_enabled() and len(weight) >= LEAST and is_plain(x, weight, bias):
        trained: Tensor = LinearGradient.apply(x, weight, bias)
        return trained if after == "none" else F.relu(trained) if after == "relu" else F.gelu(trained)
    return linear_reference(x, weight, bias, after)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, after: After = "none") -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, after, [], "none" if after == "gelu" else "")
    return found


class LinearGradient(torch.autograd.Function):
    """x W^T + b, with both products of that shape by oneDNN. Its gradients can be differentiated again."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return product(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias = None, None, None
        if ctx.needs_input_grad[0]:
            plain = torch.is_grad_enabled() or not is_plain(gradient, weight)
            to_x = gradient @ weight if plain else product(gradient, weight.t())
        flat = gradient.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            to_weight = flat.t() @ x.flatten(0, -2)
        if ctx.needs_input_grad[2]:
            to_bias = flat.sum(0)
        return to_x, to_weight, to_bias


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, after: After = "none") -> Tensor:
    product = F.linear(x, weight, bias)
    return product if after == "none" else F.relu(product) if after == "relu" else F.gelu(product)


def is_plain_inference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether these are float32 numbers of a CPU and nobody follows what is computed from them."""
    return not torch.is_grad_enabled() and is_plain(x, weight, bias)


def is_plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """The same, where gradients may follow."""
    if not (is_plain_float(x) and is_plain_float(weight)) or not has_onednn():
        return False
    if bias is not None and not is_plain_float(bias):
        return False
    followed = is_transformed() or torch.is_autocast_enabled("cpu") or torch._C._len_torch_dispatch_stack() > 0
    return not followed and x.numel() > 0 and (weight.is_mkldnn or weight.is_contiguous())


def is_plain_float(x: Tensor) -> bool:
    return type(x) in (Tensor, nn.Parameter) and x.dtype is torch.float32 and x.device.type == "cpu"


def has_onednn() -> bool:
    """Whether PyTorch was built with it and it is switched on."""
    return HAS_OPERATOR and bool(torch.backends.mkldnn.enabled)


HAS_OPERATOR = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def rows_in_cache(rows: int, width: int) -> int:
    """How many rows of so many float32 numbers are computed at a time, so that what follows finds them in the cache."""
    fitting = max(256, IN_CACHE // (4 * width))
    pieces = -(-rows // fitting)
    return -(-rows // max(pieces, 1))
