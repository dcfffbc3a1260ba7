import pytest
import torch

from mixlab.core.errors import ConfigError
from mixlab.engine.kernels import has_wide_vectors, kernels
from mixlab.ops.activations import (
    squared_relu,
    star_relu,
    star_relu_constants,
    star_relu_reference,
)
from mixlab.ops.linear import LINEAR


def test_star_relu_equals_its_equation_and_leaves_its_input() -> None:
    x, scale, bias = torch.randn(4, 7), torch.tensor([0.8944]), torch.tensor([-0.4472])
    before = x.clone()
    torch.testing.assert_close(star_relu(x, scale, bias), star_relu_reference(x, scale, bias))
    assert torch.equal(x, before)


def test_squares_of_float16_are_float32() -> None:
    assert squared_relu(torch.full((3,), 300.0, dtype=torch.float16)).isfinite().all()


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


@pytest.mark.skipif(kernels() is None, reason="installed without a compiler")
@pytest.mark.parametrize("with_offset", [True, False])
def test_star_relu_after_a_linear_layer_equals_one_after_the_other(with_offset: bool) -> None:
    torch.manual_seed(0)
    plain = [
        torch.randn(3, 40, 24),
        torch.randn(37, 24) / 5,
        torch.randn(37),
        torch.tensor([0.9]),
        torch.tensor([-0.4]),
    ]
    found = []
    for dtype in (torch.float32, torch.float64):
        inputs = [one.to(dtype, copy=True).requires_grad_() for one in plain]
        x, weight, offset, scale, bias = inputs
        given = offset if with_offset else None
        if dtype is torch.float32:
            call = (x, weight, given, scale, bias, "star_relu")
            assert LINEAR.serves(*call, training=True) == has_wide_vectors()
            out = LINEAR(*call)
        else:
            out = star_relu_reference(torch.nn.functional.linear(x, weight, given), scale, bias)
        wanted = [x, weight, *([offset] if with_offset else []), scale, bias]
        first = torch.autograd.grad(out.sin().sum(), wanted, create_graph=True)
        once = torch.autograd.grad(out.sin().sum(), wanted, retain_graph=True)
        found.append([out, *once, *first, *torch.autograd.grad(first[0].square().sum(), wanted[:2])])
    for single, double in zip(*found, strict=True):
        torch.testing.assert_close(single, double.float(), rtol=1e-4, atol=1e-5 * float(double.abs().max()))


@pytest.mark.parametrize(("mean", "variance"), [(0.0, 1.0), (0.7, 2.0), (-1.2, 0.5), (3.0, 0.1)])
def test_star_relu_constants_give_mean_0_and_variance_1(mean: float, variance: float) -> None:
    """Integrated over the density instead of derived (MetaFormer, Eq. 11)."""
    scale, bias = star_relu_constants(mean, variance)
    deviation = variance**0.5
    x = torch.linspace(mean - 12 * deviation, mean + 12 * deviation, 200_001, dtype=torch.float64)
    density = torch.exp(-0.5 * ((x - mean) / deviation) ** 2)
    density /= density.sum()
    y = scale * torch.relu(x) ** 2 + bias
    assert float((density * y).sum()) == pytest.approx(0, abs=1e-6)
    assert float((density * y**2).sum()) == pytest.approx(1, abs=1e-6)


def test_star_relu_constants_of_a_standard_normal_are_the_papers() -> None:
    assert star_relu_constants() == pytest.approx((0.8944, -0.4472), abs=5e-5)


@pytest.mark.parametrize(("mean", "variance"), [(0.0, 0.0), (0.0, -1.0), (float("nan"), 1.0), (0.0, float("inf"))])
def test_star_relu_constants_of_no_distribution_are_an_error(mean: float, variance: float) -> None:
    with pytest.raises(ConfigError, match="variance above 0"):
        star_relu_constants(mean, variance)
