"""Linear layers by our own product or oneDNN's, with an activation in the same pass, and their gradients.

Who is faster depends on rows and machine: our own product was measured with vectors of 8 and 16 numbers.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mixlab.engine.backends.kernel import NARROW, needs, why_no_kernel
from mixlab.engine.kernels import has_wide_vectors
from mixlab.engine.kernels import linear as native
from mixlab.engine.kernels.linear import AS_IT_IS, Then, run_linear, run_star, run_weight
from mixlab.ops.activations import ActivationName
from mixlab.ops.linear import LINEAR
from mixlab.ops.operator import Backend, Flat, Trainer, is_plain, why_not_plain

FEW_ROWS = 16  # below, oneDNN's product is the faster one
FEW_OUTPUTS = 16  # below, a layer is not worth training by a product of another library than PyTorch's own
HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
MISMATCH = "shapes that do not belong together, on which PyTorch has the word"
Gradients = tuple[Tensor | None, Tensor | None]  # of a layer's weight and bias


# -- without gradients ---------------------------------------------------------------------------


def why_not_layer(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """None if these are a layer and its input, else the reason why not."""
    fits = x.ndim >= 2 and weight.ndim == 2 and x.shape[-1] == weight.shape[1]
    fits = fits and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))
    return needs(fits, MISMATCH)


def why_not_own(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """None if our own product is to compute a layer, else the reason why not."""
    return (
        why_no_kernel(x, weight, bias)
        or why_not_layer(x, weight, bias)
        or needs(has_wide_vectors(), NARROW)
        or needs(x.numel() >= FEW_ROWS * x.shape[-1], "few rows, with which oneDNN is the faster one")
        or needs(native.fits(x, weight, bias), "rows that do not lie one after the other")
    )


def why_not_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """None if oneDNN can compute a layer, else the reason why not. It may have packed the weight."""
    packed = weight.is_mkldnn and weight.dtype is torch.float32
    return (
        needs(HAS_ONEDNN and bool(torch.backends.mkldnn.enabled), "PyTorch without oneDNN, or it is switched off")
        or why_not_plain(x, None if packed else weight, bias)
        or why_not_layer(x, weight, bias)
    )


def why_not_star(scale: Tensor | None, shift: Tensor | None, activation: ActivationName) -> str | None:
    if activation != "star_relu":
        return None
    single = all(x is not None and is_plain(x) and x.numel() == 1 for x in (scale, shift))
    return needs(single, "StarReLU with a scale and a shift per channel")


def why_no_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """None if either of the two products can compute a layer."""
    return why_not_own(x, weight, bias) and why_not_onednn(x, weight, bias)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, after: str = "none", then: Then = AS_IT_IS
) -> Tensor:
    """f(x W^T + b) by whichever product is to compute it. `then`: a factor and a summand behind `squared_relu`."""
    if why_not_own(x, weight, bias) is None:
        return run_linear(x, weight, bias, after, then)
    return onednn_product(x, weight, bias, after, then)


def onednn_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, after: str = "none", then: Then = AS_IT_IS
) -> Tensor:
    inside = after if after == "gelu" else "none"  # oneDNN's ReLU makes a zero of what is not a number
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, inside, [], "none" if inside == "gelu" else "")
    if after in ("relu", "squared_relu"):
        out = out.relu_().square_() if after == "squared_relu" else out.relu_()
        return out if then == AS_IT_IS else out.mul_(then[0]).add_(then[1])
    return F.silu(out, inplace=True) if after == "silu" else out


def kernel_names(activation: ActivationName, scale: Tensor | None, shift: Tensor | None) -> tuple[str, Then]:
    """What kernels call an activation, and StarReLU's two numbers."""
    if activation != "star_relu" or scale is None or shift is None:
        return activation, AS_IT_IS
    return "squared_relu", (scale.item(), shift.item())


def supports_own(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None, activation: Any
) -> str | None:
    return why_not_own(x, weight, bias) or why_not_star(scale, shift, activation)


def own(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None, activation: Any
) -> Tensor:
    return run_linear(x, weight, bias, *kernel_names(activation, scale, shift))


def supports_onednn(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None, activation: Any
) -> str | None:
    return why_not_onednn(x, weight, bias) or why_not_star(scale, shift, activation)


def onednn(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None, activation: Any
) -> Tensor:
    return onednn_product(x, weight, bias, *kernel_names(activation, scale, shift))


LINEAR.serve(Backend("kernel", supports_own, own))
LINEAR.serve(Backend("oneDNN", supports_onednn, onednn))


# -- in training ---------------------------------------------------------------------------------


def supports_training(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None, activation: Any
) -> str | None:
    return (
        needs(activation == "none", "an activation, which has an operator of its own")
        or needs(len(weight) >= FEW_OUTPUTS, "few outputs, which PyTorch's own product does well enough")
        or needs(not weight.is_mkldnn, "a packed weight")
        or why_no_product(x, weight, bias)
    )


def train(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, list[Tensor]]:
    return product(x, weight, bias), []


def gradient(gradients: list[Tensor], inputs: Flat, saved: list[Tensor], needed: list[bool], activation: Any) -> Flat:
    """All three products by whoever is faster."""
    (gradient,), (x, weight, *_) = gradients, inputs
    to_x = times(gradient, weight) if needed[0] and weight is not None else None
    rows = None if x is None or not needed[1] else x.reshape(-1, x.shape[-1])
    flat = gradient.reshape(-1, gradient.shape[-1])
    return [to_x, *layer_gradients(flat, rows, bias=needed[2]), None, None]


def times(gradient: Tensor, weight: Tensor) -> Tensor:
    """gradient W for a weight (out, in)."""
    back = weight.t()
    return gradient @ weight if why_no_product(gradient, back, None) else product(gradient, back)


def layer_gradients(
    gradient: Tensor, x: Tensor | None, *, bias: bool, onto: Gradients = (None, None)
) -> Gradients:
    """Of a weight (out, in) and a bias, from that of the output (N, out) and the input (N, in): gradient^T x, unless x
    is None, and if `bias` the sums of the gradient over N. Added to what the same call gave for other rows.
    """
    weight, sums = onto
    if x is not None and has_wide_vectors() and min(*gradient.shape, *x.shape) >= FEW_ROWS and are_rows(gradient, x):
        out = x.new_empty(gradient.shape[1], x.shape[1]) if weight is None else weight
        total = x.new_empty(gradient.shape[1]) if bias and sums is None else sums
        run_weight(gradient, x, out, total, adds=weight is not None)
        return out, total
    if x is not None:
        weight = gradient.t() @ x if weight is None else weight.addmm_(gradient.t(), x)
    if bias:
        sums = gradient.sum(0) if sums is None else sums.add_(gradient.sum(0))
    return weight, sums


def are_rows(*matrices: Tensor) -> bool:
    """Whether the rows of (N, C) can be walked."""
    return all(is_plain(x) and x.stride(1) == 1 and x.stride(0) >= x.shape[1] for x in matrices)


LINEAR.train(Trainer("product", supports_training, train, gradient))


# -- StarReLU after a linear layer ---------------------------------------------------------------


def supports_star_training(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None, activation: Any
) -> str | None:
    return (
        needs(activation == "star_relu", "no StarReLU")
        or why_not_star(scale, shift, activation)
        or why_not_own(x, weight, bias)
    )


def train_star(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, shift: Tensor, activation: Any
) -> tuple[Tensor, list[Tensor]]:
    """scale * relu(x W^T + b)^2 + shift; keeps the ReLU."""
    rectified, then = x.new_empty(*x.shape[:-1], len(weight)), (scale.item(), shift.item())
    return run_linear(x, weight, bias, "and_relu", then, aside=rectified), [rectified]


def star_gradient(
    gradients: list[Tensor], inputs: Flat, saved: list[Tensor], needed: list[bool], activation: Any
) -> Flat:
    (gradient,), (x, weight, _, scale, shift), (rectified,) = gradients, inputs, saved
    assert x is not None
    assert weight is not None
    assert scale is not None
    assert shift is not None
    to_hidden, to_scale, to_shift = run_star(gradient.contiguous(), rectified, 2 * scale.item())
    rows = x.reshape(-1, x.shape[-1]) if needed[1] else None
    layer = layer_gradients(to_hidden.flatten(0, -2), rows, bias=needed[2])
    to_x = times(to_hidden, weight) if needed[0] else None
    return [to_x, *layer, to_scale.view_as(scale), to_shift.view_as(shift)]


LINEAR.train(Trainer("star", supports_star_training, train_star, star_gradient))

