from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mixlab.core.compat import has_onednn_products
from mixlab.engine.backends import mlp as module
from mixlab.ops import mlp as written
from mixlab.ops.activations import ActivationName

mlp: Callable[..., Tensor] = written.mlp
mlp_reference: Callable[..., Tensor] = written.mlp_reference
pytestmark = pytest.mark.skipif(not has_onednn_products(), reason="PyTorch without oneDNN")
INNERS: list[ActivationName] = ["relu", "squared_relu", "gelu"]


def layers(*, bias: bool = True, rows: int = 37) -> list[Tensor]:
    """Input, first weight and bias, second weight and bias."""
    shapes = [(rows, 20), (24, 20), (24,), (16, 24), (16,)]
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    return tensors if bias else [tensors[0], tensors[1], tensors[3]]


def order(tensors: list[Tensor]) -> list[Tensor | None]:
    return list(tensors) if len(tensors) == 5 else [tensors[0], tensors[1], None, tensors[2], None]


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("at_once", [2**23, 1])  # bytes; all rows, and 256 at a time: the last 8 are few
def test_equals_the_reference_also_in_gradients(
    inner: ActivationName, bias: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AT_ONCE", at_once)
    tensors = layers(bias=bias, rows=520)
    x, first, inner_bias, second, offset = order(tensors)
    assert x is not None
    assert first is not None
    assert second is not None
    fast = mlp(x.view(2, 260, 20), first, inner_bias, second, offset, inner).view(520, 16)
    slow = mlp_reference(x, first, inner_bias, second, offset, activation=inner)
    factor = torch.randn_like(slow)
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-4)
    ours, theirs = (torch.autograd.grad((out * factor).sum(), tensors) for out in (fast, slow))
    for gradient, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("place", range(5))
def test_one_gradient_alone(inner: ActivationName, place: int) -> None:
    tensors = [one.detach() for one in layers()]
    tensors[place].requires_grad_()
    ours, theirs = mlp(*tensors, inner), mlp_reference(*tensors, activation=inner)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    factor = torch.randn_like(theirs)
    found, expected = (torch.autograd.grad((out * factor).sum(), tensors[place])[0] for out in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("inner", INNERS)
def test_differentiated_twice(inner: ActivationName) -> None:
    tensors = layers()

    def of_gradient(out: Tensor) -> Tensor:
        gradients = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
        return torch.stack([gradient.square().mean() for gradient in gradients]).sum()

    ours, theirs = (
        torch.autograd.grad(of_gradient(form(*tensors, activation=inner)), tensors) for form in (mlp, mlp_reference)
    )
    for gradient, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("again", [True, False])
def test_one_layer_behind_itself(inner: ActivationName, again: bool) -> None:
    tensors = [torch.randn(shape, requires_grad=True) for shape in [(37, 12), (24, 12), (24,), (12, 24), (12,)]]
    x, *weights = tensors

    def gradients(form: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        out = form(form(x, *weights, activation=inner), *weights, activation=inner)
        with torch.autocast("cpu", enabled=not again):  # a backward pass that may not be fast
            return torch.autograd.grad(out.square().mean(), tensors, create_graph=again)

    for gradient, expected in zip(gradients(mlp), gradients(mlp_reference), strict=True):
        assert (gradient - expected).norm() <= (1e-4 if again else 5e-2) * expected.norm()  # of bfloat16


@pytest.mark.parametrize("inner", INNERS)
def test_many_gradients_at_once(inner: ActivationName) -> None:
    tensors, many = layers(), torch.randn(5, 37, 16)
    ours, theirs = (
        torch.autograd.grad(form(*tensors, activation=inner), tensors, many, is_grads_batched=True)
        for form in (mlp, mlp_reference)
    )
    for gradient, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("inner", INNERS)
def test_what_is_not_a_number_stays_so(inner: ActivationName) -> None:
    tensors = layers()
    with torch.no_grad():
        tensors[0][3, 5] = torch.nan
    out = mlp(*tensors, inner)
    assert out[3].isnan().all()
    assert out[:3].isfinite().all()
