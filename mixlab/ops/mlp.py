"""The channel MLP in training on a CPU: both layers and what is between them in one step.

Its gradient keeps the hidden layer once, where PyTorch keeps it in front of the activation and behind it: in front of
GELU, behind a ReLU and its square. It works on as many tokens at a time as caches hold, and where our own product runs
activations and their slopes are part of it.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mixlab.core.guards import is_many
from mixlab.engine.kernels import linear as native
from mixlab.engine.kernels.linear import run_linear, run_mlp
from mixlab.ops.linear import Pair, is_fast, is_own_product, layer_gradients, linear_reference, product
from mixlab.ops.written import written_gradients

Inner = Literal["relu", "squared_relu", "gelu"]
AT_ONCE = 2**23  # bytes of the hidden layer


def mlp_reference(
    x: Tensor, first: Tensor, inner_bias: Tensor | None, second: Tensor, bias: Tensor | None, *, inner: Inner
) -> Tensor:
    """Linear, activation, linear."""
    hidden = linear_reference(x, first, inner_bias)
    active = F.gelu(hidden) if inner == "gelu" else F.relu(hidden)
    return linear_reference(active.square() if inner == "squared_relu" else active, second, bias)


def mlp(
    x: Tensor, first: Tensor, inner_bias: Tensor | None, second: Tensor, bias: Tensor | None, *, inner: Inner
) -> Tensor:
    """`mlp_reference` of (..., C) with gradients, for what `is_fast`."""
    found: Tensor = MlpGradient.apply(x.reshape(-1, x.shape[-1]), first, inner_bias, second, bias, inner)
    return found.unflatten(0, x.shape[:-1])


class MlpGradient(torch.autograd.Function):
    """`mlp` of (N, C). Its gradients can be differentiated again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, first: Tensor, inner_bias: Tensor | None, second: Tensor, bias: Tensor | None, inner: Inner
    ) -> Tensor:
        hidden = x.new_empty(len(x), len(first))
        if is_own_product(x, first, inner_bias) and native.fits(hidden, second, bias):
            out = run_mlp(x, first, inner_bias, second, bias, "and_gelu" if inner == "gelu" else inner, hidden=hidden)
        else:
            out, rows = x.new_empty(len(x), len(second)), rows_at_once(first)
            for some, inside, place in zip(x.split(rows), hidden.split(rows), out.split(rows), strict=True):
                inside.copy_(product(some, first, inner_bias, "none" if inner == "gelu" else inner))
                place.copy_(product(activate(inside, inner), second, bias))
        ctx.inner = inner
        ctx.save_for_backward(x, first, inner_bias, second, bias, hidden)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, first, inner_bias, second, bias, kept = ctx.saved_tensors
        inputs, needed = (x, first, inner_bias, second, bias), ctx.needs_input_grad[:5]
        if torch.is_grad_enabled() or is_many(gradient) or not is_fast(gradient, second.t()):  # as it is written

            def written(*inputs: Any) -> Tensor:
                return mlp_reference(*inputs, inner=ctx.inner)

            return *written_gradients(written, inputs, needed, gradient), None
        back = (second * 2 if ctx.inner == "squared_relu" else second).t()  # the slope of r^2 is 2 r
        to_x = torch.empty_like(x, memory_format=torch.contiguous_format) if needed[0] else None
        layers: list[Pair] = [(None, None)] * 2  # of each the weight and the bias
        rows = rows_at_once(first)
        for index, (some, hidden) in enumerate(zip(gradient.split(rows), kept.split(rows), strict=True)):
            here = slice(index * rows, index * rows + len(some))
            active = None
            if any(needed[:3]):
                place = None if to_x is None else to_x[here]
                to_hidden, active = hidden_gradient(some, back, hidden, ctx.inner, first.t(), place)
                layers[0] = layer_gradients(to_hidden, x[here] if needed[1] else None, bias=needed[2], onto=layers[0])
            elif needed[3]:
                active = activate(hidden, ctx.inner)
            layers[1] = layer_gradients(some, active if needed[3] else None, bias=needed[4], onto=layers[1])
        return to_x, *layers[0], *layers[1], None


def rows_at_once(weight: Tensor) -> int:
    return max(256, AT_ONCE // (4 * len(weight)))


def activate(kept: Tensor, inner: Inner) -> Tensor:
    """What the second layer takes, from what is kept."""
    return F.gelu(kept) if inner == "gelu" else kept


def hidden_gradient(
    gradient: Tensor, back: Tensor, kept: Tensor, inner: Inner, further: Tensor, to_x: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradient in front of the activation, and what the second layer took. `back` has the 2 of a square's slope.

    The gradient times `further` goes into `to_x`.
    """
    if inner != "relu" and is_own_product(gradient, back, None) and native.fits(kept, further, None):
        active = torch.empty_like(kept) if inner == "gelu" else None
        found, after = torch.empty_like(kept), "times_root" if active is None else "gelu_slope"
        if to_x is None:
            run_linear(gradient, back, None, after, out=found, beside=kept, aside=active)
        else:
            run_mlp(gradient, back, None, further, None, after, out=to_x, hidden=found, beside=kept, aside=active)
        return found, kept if active is None else active
    found, active = product(gradient, back), activate(kept, inner)
    if inner == "gelu":
        torch.ops.aten.gelu_backward.grad_input(found, kept, grad_input=found)
    elif inner == "squared_relu":
        found.mul_(kept.sqrt())
    else:
        torch.ops.aten.threshold_backward.grad_input(found, kept, 0, grad_input=found)
    if to_x is not None:
        to_x.copy_(product(found, further))
    return found, active
