"""Linear layers by our own product or oneDNN's, with an activation in the same pass, and their gradients."""

from typing import Any

from torch import Tensor

from mixlab.engine.kernels import has_wide_vectors
from mixlab.engine.kernels.linear import AS_IT_IS, Then, run_linear, run_star, run_weight
from mixlab.engine.product import FEW_ROWS, onednn_product, product, why_no_product, why_not_onednn, why_not_own
from mixlab.engine.reasons import needs
from mixlab.ops.activations import ActivationName
from mixlab.ops.linear import LINEAR
from mixlab.ops.operator import Backend, Flat, TrainingBackend, is_plain

FEW_OUTPUTS = 16  # below, a layer is not worth training by a product of another library than PyTorch's own
Gradients = tuple[Tensor | None, Tensor | None]  # of a layer's weight and bias


# -- without gradients ---------------------------------------------------------------------------


def why_not_star(scale: Tensor | None, shift: Tensor | None, activation: ActivationName) -> str | None:
    if activation != "star_relu":
        return None
    single = all(x is not None and is_plain(x) and x.numel() == 1 for x in (scale, shift))
    return needs(single, "StarReLU with a scale and a shift per channel")


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


def layer_gradients(gradient: Tensor, x: Tensor | None, *, bias: bool, onto: Gradients = (None, None)) -> Gradients:
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


LINEAR.train(TrainingBackend("product", supports_training, train, gradient))


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


LINEAR.train(TrainingBackend("star", supports_star_training, train_star, star_gradient))
