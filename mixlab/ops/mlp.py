"""The channel MLP in training on a CPU: both layers and what is between them in one step.

Its gradient keeps the hidden layer once, where PyTorch keeps it in front of the activation and behind it, and works on
as many tokens at a time as caches hold.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mixlab.guards import is_many
from mixlab.ops.linear import is_fast, linear_reference, product

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
        out, kept, rows = x.new_empty(len(x), len(second)), [], rows_at_once(first)
        for some, place in zip(x.split(rows), out.split(rows), strict=True):
            hidden = product(some, first, inner_bias)
            kept.append(hidden if inner == "gelu" else hidden.relu_())
            place.copy_(product(activate(hidden, inner), second, bias))
        ctx.inner = inner
        ctx.save_for_backward(x, first, inner_bias, second, bias, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, first, inner_bias, second, bias, *kept = ctx.saved_tensors
        inputs, needed = (x, first, inner_bias, second, bias), ctx.needs_input_grad[:5]
        if torch.is_grad_enabled() or is_many(gradient) or not is_fast(gradient, second.t()):  # as it is written
            return *of_reference(inputs, needed, gradient, ctx.inner), None
        back = (second * 2 if ctx.inner == "squared_relu" else second).t()
        to_x = torch.empty_like(x, memory_format=torch.contiguous_format) if needed[0] else None
        sums: list[Tensor | None] = [None] * 3  # of the first layer's weight and bias, and of the second's weight
        start = 0
        for hidden in kept:
            here = slice(start, start := start + len(hidden))
            if needed[3]:
                sums[2] = add_product(sums[2], gradient[here], activate(hidden, ctx.inner))
            if not any(needed[:3]):
                continue
            to_hidden = deactivate_(product(gradient[here], back), hidden, ctx.inner)
            if needed[1]:
                sums[0] = add_product(sums[0], to_hidden, x[here])
            if needed[2]:
                sums[1] = to_hidden.sum(0) if sums[1] is None else sums[1].add_(to_hidden.sum(0))
            if to_x is not None:
                to_x[here] = product(to_hidden, first.t())
        return to_x, sums[0], sums[1], sums[2], gradient.sum(0) if needed[4] else None, None


def rows_at_once(weight: Tensor) -> int:
    return max(256, AT_ONCE // (4 * len(weight)))


def activate(hidden: Tensor, inner: Inner) -> Tensor:
    """From what is kept: the hidden layer, in front of GELU or behind ReLU."""
    if inner == "gelu":
        return F.gelu(hidden)
    return hidden.square() if inner == "squared_relu" else hidden


def deactivate_(gradient: Tensor, hidden: Tensor, inner: Inner) -> Tensor:
    """The gradient in front of the activation, in its memory; the 2 of the square's is in it already."""
    if inner == "gelu":
        return torch.ops.aten.gelu_backward.grad_input(gradient, hidden, grad_input=gradient)
    if inner == "squared_relu":
        return gradient.mul_(hidden)
    return torch.ops.aten.threshold_backward.grad_input(gradient, hidden, 0, grad_input=gradient)


def add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left^T right"""
    return left.t() @ right if total is None else total.addmm_(left.t(), right)


def of_reference(
    inputs: tuple[Any, ...], needed: tuple[bool, ...], gradient: Tensor, inner: Inner
) -> list[Tensor | None]:
    """Gradients by PyTorch's own, which can be differentiated. Views keep them out of the history of the inputs."""
    with torch.enable_grad():
        inputs = tuple(None if one is None else one.view_as(one) for one in inputs)
        out = mlp_reference(*inputs, inner=inner)
    wanted = [one for one, need in zip(inputs, needed, strict=True) if need]
    found = iter(torch.autograd.grad(out, wanted, gradient, create_graph=torch.is_grad_enabled()))
    return [next(found) if need else None for need in needed]
