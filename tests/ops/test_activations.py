import pytest
import torch

from mixlab.ops.activations import (
    squared_relu,
    star_relu,
    star_relu_linear,
    star_relu_linear_reference,
    star_relu_reference,
)
from tests.ops.agree import assert_agree


def test_star_relu_equals_its_equation_and_leaves_its_input() -> None:
    x, scale, bias = torch.randn(4, 7), torch.tensor([0.8944]), torch.tensor([-0.4472])
    before = x.clone()
    torch.testing.assert_close(star_relu(x, scale, bias), star_relu_reference(x, scale, bias))
    assert torch.equal(x, before)
    torch.testing.assert_close(star_relu(x, scale, bias, overwrite=True), star_relu_reference(before, scale, bias))


def test_squared_relu_in_place_equals_the_copy() -> None:
    x = torch.randn(50)
    torch.testing.assert_close(squared_relu(x), squared_relu(x.clone(), overwrite=True))


@pytest.mark.parametrize("rows", [3, 400])  # fewer and more activations than weights
@pytest.mark.parametrize("with_offset", [True, False])
def test_star_relu_linear_equals_one_after_the_other_also_in_gradients(rows: int, with_offset: bool) -> None:
    shapes = [(rows, 12), (1,), (1,), (5, 12)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    offset = torch.randn(5, dtype=torch.float64, requires_grad=True) if with_offset else None
    x, scale, bias, weight = inputs
    fast = star_relu_linear(x, scale, bias, weight, offset)
    slow = star_relu_linear_reference(x, scale, bias, weight, offset)
    assert_agree(fast, slow, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_star_relu_gradients_are_those_of_its_equation(dtype: torch.dtype) -> None:
    inputs = [torch.randn(64, 33).to(dtype), torch.tensor([0.8944]).to(dtype), torch.tensor([-0.4472]).to(dtype)]
    ours = [tensor.clone().requires_grad_() for tensor in inputs]
    expected = [tensor.double().requires_grad_() for tensor in inputs]
    weights = torch.randn(64, 33)
    (star_relu(*ours) * weights).sum().backward()
    (star_relu_reference(*expected) * weights).sum().backward()
    for one, other in zip(ours, expected, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        bound = 1e-5 if dtype is torch.float32 else 0.05
        assert (one.grad - other.grad).abs().max() <= bound * other.grad.abs().max()


@pytest.mark.parametrize("what", ["squared", "star"])
def test_gradients_of_activations_can_be_differentiated_again(what: str) -> None:
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    scale, bias = (torch.randn(1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    if what == "squared":
        assert torch.autograd.gradgradcheck(squared_relu, (x,))
    else:
        assert torch.autograd.gradgradcheck(star_relu, (x, scale, bias))
