"""Pooling and the norm over a whole image at every level of instructions, beside the references in double precision."""

from collections.abc import Iterator

import pytest
import torch

from mixlab.core.grid import Grid
from mixlab.engine.kernels.norm import Norm
from mixlab.engine.kernels.pool import run_pool, run_whole_norm
from mixlab.engine.steps import Sum
from mixlab.ops.norms import global_norm_reference
from mixlab.ops.pool import pool_reference
from tests.engine.drafts import computed
from tests.engine.kernels.test_kernels import LEVELS, at_level, near


@pytest.fixture(params=LEVELS)
def lanes(request: pytest.FixtureRequest) -> Iterator[int]:
    yield from at_level(request.param)


@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("shape", [(2, 5, 6, 20), (1, 1, 3, 7), (3, 8, 2, 64)])
def test_pooling_and_its_gradient(lanes: int, shape: tuple[int, ...], size: int) -> None:
    x, grid = torch.randn(shape), Grid(shape[1], shape[2])
    exact = x.double().flatten(1, 2).requires_grad_()
    expected = pool_reference(exact, grid, size)
    near(run_pool(x, size).flatten(1, 2), expected.detach())
    (wanted,) = torch.autograd.grad(expected, exact, x.double().flatten(1, 2))
    near(run_pool(x, size, back=True).flatten(1, 2), wanted)


@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("with_branch", [True, False])
def test_pooling_with_its_residual_sum(lanes: int, with_residual: bool, with_branch: bool) -> None:
    x, stream, grid = torch.randn(2, 20, 12), torch.randn(2, 20, 12), Grid(4, 5)
    residual, branch = torch.randn(12) if with_residual else None, torch.randn(12) if with_branch else None
    pooled = pool_reference(x.double(), grid, 3)
    expected = stream.double() * (1 if residual is None else residual) + pooled * (1 if branch is None else branch)
    found = computed(lambda draft, x, stream: draft.pool(3, (2, 4, 5), 12, x, Sum(stream, residual, branch)), x, stream)
    near(found, expected)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 16), (3, 49, 32), (2, 200, 43)])
def test_the_norm_over_a_whole_image(lanes: int, shape: tuple[int, ...], with_bias: bool) -> None:
    x, weight = torch.randn(shape) + 100, torch.randn(shape[2])  # a mean that is large beside the spread
    bias = torch.randn(shape[2]) if with_bias else None
    expected = global_norm_reference(x.double(), weight.double(), None if bias is None else bias.double(), 1e-5)
    near(run_whole_norm(x, Norm(weight, bias, 1e-5)), expected, 1e-4)


def test_what_is_not_a_number_spreads_over_its_image_alone(lanes: int) -> None:
    x = torch.randn(2, 100, 16)
    x[1, 70, 3] = torch.nan
    found = run_whole_norm(x, Norm(torch.ones(16), None, 1e-5)).isnan()
    assert not found[0].any()
    assert found[1].all()
