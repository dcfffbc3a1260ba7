"""Linear layers on a CPU: oneDNN's product or our own instead of the BLAS's, with an activation in the same pass.

With AVX2 oneDNN reaches 85 to 105 billion multiply-accumulates per second where `F.linear` reaches 55 to 95, most where
there are few rows; our own is faster by up to a quarter. With AVX-512 on an AMD, where `F.linear` leaves half of the
processor unused, ours reaches 225 to 275, oneDNN 215 to 265 and `F.linear` 85 to 120. Whatever else follows the
arithmetic (a compiler, a tracer, autocast, counters) gets `F.linear`.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixlab.core.guards import is_many, is_transformed
from mixlab.engine.kernels import has_wide_vectors, is_plain
from mixlab.engine.kernels import linear as native
from mixlab.engine.kernels.linear import AS_IT_IS, Then

After = Literal["none", "gelu", "squared_relu", "relu", "silu"]
LEAST = 16  # outputs of a layer from which training it takes the fast way
IN_CACHE = 5 * 2**19  # bytes of an intermediate result that caches of two cores hold
MANY = 16  # rows from which our own product is faster
TWO = 480  # rows from which two layers are computed together
FOLLOWING: dict[After, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "squared_relu": lambda x: F.relu(x).square(),
}
HAS_OPERATOR = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, after: After = "none") -> Tensor:
    """`linear_reference` by the fastest way for what is given. A weight may be packed by oneDNN."""
    if not is_fast(x, weight, bias):
        return linear_reference(x, weight, bias, after)
    if not torch.is_grad_enabled():
        return product(x, weight, bias, after)
    if len(weight) < LEAST or weight.is_mkldnn or not needs_gradient(x, weight, bias):
        return linear_reference(x, weight, bias, after)
    trained: Tensor = LinearGradient.apply(x, weight, bias)
    return follow(trained, after)


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, after: After = "none") -> Tensor:
    return follow(F.linear(x, weight.to_dense() if weight.is_mkldnn else weight, bias), after)


def follow(x: Tensor, after: After) -> Tensor:
    """The activation as it is written."""
    return FOLLOWING[after](x)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, after: After = "none", then: Then = AS_IT_IS
) -> Tensor:
    """The same by our own kernel or by oneDNN, for what `is_fast`. `then`: a factor and a summand behind
    `squared_relu`.
    """
    if is_own_product(x, weight, bias):
        return native.run_linear(x, weight, bias, after, then)
    inside: After = after if after == "gelu" else "none"  # oneDNN's ReLU makes a zero of what is not a number
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, inside, [], "none" if inside == "gelu" else "")
    if after in ("relu", "squared_relu"):
        found = found.relu_().square_() if after == "squared_relu" else found.relu_()
        return found if then == AS_IT_IS else found.mul_(then[0]).add_(then[1])
    return F.silu(found, inplace=True) if after == "silu" else found


def is_own_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether our own kernel is the faster one: measured with vectors of 8 and 16 numbers."""
    return not weight.is_mkldnn and suits_own_product(x) and native.fits(x, weight, bias)


def suits_own_product(x: Tensor) -> bool:
    """The same as far as rows and the machine decide."""
    return has_wide_vectors() and x.numel() >= MANY * x.shape[-1]


Pair = tuple[Tensor | None, Tensor | None]  # of a layer's weight and bias


def layer_gradients(gradient: Tensor, x: Tensor | None, *, bias: bool, onto: Pair = (None, None)) -> Pair:
    """Of a weight (out, in) and a bias, from that of the output (N, out) and the input (N, in): gradient^T x, unless x
    is None, and if `bias` the sums of the gradient over N. Added to what the same call found for other rows.
    """
    weight, sums = onto
    if x is not None and suits_weight_kernel(gradient, x):
        out = x.new_empty(gradient.shape[1], x.shape[1]) if weight is None else weight
        total = x.new_empty(gradient.shape[1]) if bias and sums is None else sums
        native.run_weight(gradient, x, out, total, adds=weight is not None)
        return out, total
    if x is not None:
        weight = gradient.t() @ x if weight is None else weight.addmm_(gradient.t(), x)
    if bias:
        sums = gradient.sum(0) if sums is None else sums.add_(gradient.sum(0))
    return weight, sums


def suits_weight_kernel(gradient: Tensor, x: Tensor) -> bool:
    """Whether our own kernel is the faster one: beside the BLAS twice as fast with vectors of 16 numbers."""
    if not has_wide_vectors() or torch.is_grad_enabled() or is_followed():
        return False
    return min(*gradient.shape, *x.shape) >= MANY and is_rows(gradient) and is_rows(x)


def is_rows(x: Tensor) -> bool:
    """Plain (N, C) whose rows can be walked."""
    return is_plain(x) and x.stride(1) == 1 and x.stride(0) >= x.shape[1]


class LinearGradient(torch.autograd.Function):
    """x W^T + b, all three products by the fastest way. Its gradients can be differentiated again."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return product(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _ = inputs
        ctx.save_for_backward(x if weight.requires_grad else None, weight if x.requires_grad else None)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        to_x = None
        if weight is not None:
            plain = torch.is_grad_enabled() or not is_fast(gradient, weight.t())
            to_x = gradient @ weight if plain else product(gradient, weight.t())
        flat, rows = gradient.reshape(-1, gradient.shape[-1]), None if x is None else x.reshape(-1, x.shape[-1])
        return to_x, *layer_gradients(flat, rows, bias=ctx.needs_input_grad[2])


def needs_gradient(*tensors: Tensor | None) -> bool:
    return any(one is not None and one.requires_grad for one in tensors)


def is_fast(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether these are float32 numbers of a CPU that fit each other, and nothing but autograd follows them."""
    if not (is_plain_float(x) and is_plain_float(weight) and has_onednn()) or x.ndim < 2 or not x.numel():
        return False
    if weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        return False  # PyTorch has words for that
    if bias is not None and not (is_plain_float(bias) and bias.shape == weight.shape[:1] and bias.is_contiguous()):
        return False
    return not (is_followed() or x.is_neg() or weight.is_neg())


def is_followed() -> bool:
    """Whether a compiler, a transform, autocast or a counter has to see the operators."""
    return is_transformed() or torch.is_autocast_enabled("cpu") or torch._C._len_torch_dispatch_stack() > 0


def is_plain_float(x: Tensor) -> bool:
    if x.dtype is not torch.float32 or not x.is_cpu or not (x.layout is torch.strided or x.is_mkldnn):
        return False
    return type(x) is nn.Parameter or (type(x) is Tensor and not is_many(x))


def has_onednn() -> bool:
    """Whether PyTorch was built with it and it is switched on."""
    return HAS_OPERATOR and bool(torch.backends.mkldnn.enabled)


def rows_in_cache(rows: int, width: int) -> int:
    """How many rows of so many float32 numbers are computed at a time, so that what follows finds them in the cache."""
    fitting = max(256, IN_CACHE // (4 * width))
    pieces = -(-rows // fitting)
    return -(-rows // max(pieces, 1))
