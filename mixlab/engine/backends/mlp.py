"""The channel MLP: both layers in one kernel, or as many tokens at a time as caches hold.

Its gradient keeps the hidden layer once, where PyTorch keeps it in front of the activation and after it: in front of
GELU, after a ReLU and its square. Where our own product runs, activations and their slopes are part of it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mixlab.engine.backends.linear import Gradients, kernel_names, layer_gradients, why_not_star
from mixlab.engine.kernels import linear as native
from mixlab.engine.kernels.linear import AS_IT_IS, run_linear, run_mlp
from mixlab.engine.product import product, why_no_product, why_not_own
from mixlab.engine.reasons import needs
from mixlab.ops.mlp import MLP, folded
from mixlab.ops.operator import Backend, Flat, TrainingBackend, why_not_plain

MANY_ROWS = 480  # from which both layers are one kernel
IN_CACHE = 5 * 2**19  # bytes of the hidden layer that caches of two cores hold
AT_ONCE = 2**23  # bytes of the hidden layer in training
TRAINED = ("relu", "squared_relu", "gelu", "star_relu")
Two = tuple[Tensor, Tensor | None, Tensor, Tensor | None]  # both weights, each with its bias


def why_not_mlp(x: Tensor, layers: Two, star: tuple[Tensor | None, Tensor | None], activation: Any) -> str | None:
    """None if one product or the other can compute both layers."""
    first, inner_bias, second, bias = layers
    fits = second.ndim == 2 and first.ndim == 2 and second.shape[1] == len(first)
    fits = fits and (bias is None or (bias.shape == second.shape[:1] and bias.is_contiguous()))
    return (
        why_not_star(*star, activation)
        or needs(fits, "layers that do not follow each other")
        or why_not_plain(None if second.is_mkldnn else second, bias)
        or why_no_product(x, first, inner_bias)
    )


# -- without gradients ---------------------------------------------------------------------------


def supports(
    x: Tensor,
    first: Tensor,
    inner_bias: Tensor | None,
    second: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    activation: Any,
) -> str | None:
    return why_not_mlp(x, (first, inner_bias, second, bias), (scale, shift), activation)


def run(
    x: Tensor,
    first: Tensor,
    inner_bias: Tensor | None,
    second: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    activation: Any,
) -> Tensor:
    rows, (after, then) = x.reshape(-1, x.shape[-1]), kernel_names(activation, scale, shift)
    plain = first.is_contiguous() and second.is_contiguous() and not second.is_mkldnn
    if len(rows) >= MANY_ROWS and plain and why_not_own(x, first, inner_bias) is None:
        return run_mlp(x, first, inner_bias, second, bias, after, then)
    step = rows_in_cache(len(rows), len(first))
    if step == len(rows):
        hidden = product(rows, first, inner_bias, after, then)
        return product(hidden, second, bias).unflatten(0, x.shape[:-1])
    out = rows.new_empty(len(rows), len(second))
    for place, some in zip(out.split(step), rows.split(step), strict=True):
        place.copy_(product(product(some, first, inner_bias, after, then), second, bias))
    return out.unflatten(0, x.shape[:-1])


def rows_in_cache(rows: int, width: int) -> int:
    """How many rows of so many float32 numbers are computed at a time, so that what follows finds them in the cache."""
    fitting = max(256, IN_CACHE // (4 * width))
    pieces = -(-rows // fitting)
    return -(-rows // max(pieces, 1))


MLP.serve(Backend("kernel", supports, run))


# -- in training ---------------------------------------------------------------------------------


def supports_training(
    x: Tensor,
    first: Tensor,
    inner_bias: Tensor | None,
    second: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    activation: Any,
) -> str | None:
    large = x.numel() > 2 * x.shape[-1] ** 2
    return (
        needs(activation in TRAINED, "an activation whose slope is not known")
        or needs(large, "fewer activations than weights")
        or needs(not (first.is_mkldnn or second.is_mkldnn), "packed weights")
        or why_not_mlp(x, (first, inner_bias, second, bias), (scale, shift), activation)
    )


def train(
    x: Tensor,
    first: Tensor,
    inner_bias: Tensor | None,
    second: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    activation: Any,
) -> tuple[Tensor, list[Tensor]]:
    inner, rows = "squared_relu" if activation == "star_relu" else activation, x.reshape(-1, x.shape[-1])
    if activation == "star_relu" and scale is not None and shift is not None:
        second, bias = folded(second, bias, scale, shift)
    hidden = x.new_empty(len(rows), len(first))
    if why_not_own(rows, first, inner_bias) is None and native.fits(hidden, second, bias):
        after = "and_gelu" if inner == "gelu" else inner
        out = run_mlp(rows, first, inner_bias, second, bias, after, AS_IT_IS, hidden=hidden)
    else:
        out, step = x.new_empty(len(rows), len(second)), rows_at_once(first)
        for some, inside, place in zip(rows.split(step), hidden.split(step), out.split(step), strict=True):
            inside.copy_(product(some, first, inner_bias, "none" if inner == "gelu" else inner))
            place.copy_(product(activate(inside, inner), second, bias))
    return out.unflatten(0, x.shape[:-1]), [hidden]


def gradient(gradients: list[Tensor], inputs: Flat, saved: list[Tensor], needed: list[bool], activation: Any) -> Flat:
    x, first, _, second, bias, scale, shift = inputs
    assert first is not None
    assert second is not None
    assert x is not None
    if activation != "star_relu":
        return [*layers_gradient(gradients[0], x, first, second, saved[0], needed[:5], activation), None, None]
    assert scale is not None
    assert shift is not None
    weight, _ = folded(second, bias, scale, shift)
    wants_second, wants_star = needed[3], needed[5] or needed[6]
    wanted = [*needed[:3], wants_second or wants_star, needed[4] or wants_second or wants_star]
    *others, to_weight, to_bias = layers_gradient(gradients[0], x, first, weight, saved[0], wanted, "squared_relu")
    if to_weight is None or to_bias is None:
        return [*others, None, to_bias, None, None]
    to_second = torch.addcmul(shift * to_bias[:, None], to_weight, scale) if wants_second else None
    to_scale = (to_weight * second).sum().view_as(scale) if needed[5] else None
    to_shift = torch.dot(to_bias, second.sum(1)).view_as(shift) if needed[6] else None
    return [*others, to_second, to_bias, to_scale, to_shift]


def layers_gradient(
    gradient: Tensor, x: Tensor, first: Tensor, second: Tensor, kept: Tensor, needed: list[bool], inner: str
) -> list[Tensor | None]:
    """Those of the input, the first weight and bias, the second weight and bias."""
    tokens, flat = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    back = (second * 2 if inner == "squared_relu" else second).t()  # the slope of r^2 is 2 r
    to_x = torch.empty_like(tokens, memory_format=torch.contiguous_format) if needed[0] else None
    layers: list[Gradients] = [(None, None)] * 2
    rows = rows_at_once(first)
    for index, (some, hidden) in enumerate(zip(flat.split(rows), kept.split(rows), strict=True)):
        here = slice(index * rows, index * rows + len(some))
        active = None
        if any(needed[:3]):
            place = None if to_x is None else to_x[here]
            to_hidden, active = hidden_gradient(some, back, hidden, inner, first.t(), place)
            layers[0] = layer_gradients(to_hidden, tokens[here] if needed[1] else None, bias=needed[2], onto=layers[0])
        elif needed[3]:
            active = activate(hidden, inner)
        layers[1] = layer_gradients(some, active if needed[3] else None, bias=needed[4], onto=layers[1])
    return [None if to_x is None else to_x.view(x.shape), *layers[0], *layers[1]]


def rows_at_once(weight: Tensor) -> int:
    return max(256, AT_ONCE // (4 * len(weight)))


def activate(kept: Tensor, inner: str) -> Tensor:
    """What the second layer takes, from what is kept."""
    return F.gelu(kept) if inner == "gelu" else kept


def hidden_gradient(
    gradient: Tensor, back: Tensor, kept: Tensor, inner: str, further: Tensor, to_x: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradient in front of the activation, and what the second layer took. `back` has the 2 of a square's slope.

    The gradient times `further` goes into `to_x`.
    """
    if inner != "relu" and why_not_own(gradient, back, None) is None and native.fits(kept, further, None):
        active = torch.empty_like(kept) if inner == "gelu" else None
        to_hidden, after = torch.empty_like(kept), "times_root" if active is None else "gelu_slope"
        if to_x is None:
            run_linear(gradient, back, None, after, out=to_hidden, beside=kept, aside=active)
        else:
            run_mlp(gradient, back, None, further, None, after, out=to_x, hidden=to_hidden, beside=kept, aside=active)
        return to_hidden, kept if active is None else active
    to_hidden, active = product_or_plain(gradient, back), activate(kept, inner)
    if inner == "gelu":
        torch.ops.aten.gelu_backward.grad_input(to_hidden, kept, grad_input=to_hidden)
    elif inner == "squared_relu":
        to_hidden.mul_(kept.sqrt())
    else:
        torch.ops.aten.threshold_backward.grad_input(to_hidden, kept, 0, grad_input=to_hidden)
    if to_x is not None:
        to_x.copy_(product_or_plain(to_hidden, further))
    return to_hidden, active


def product_or_plain(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t() if why_no_product(x, weight, None) else product(x, weight)


MLP.train(TrainingBackend("product", supports_training, train, gradient))
