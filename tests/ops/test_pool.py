import pytest
import torch

from mixlab.core.grid import Grid
from mixlab.engine.kernels import has_kernels
from mixlab.ops.pool import pool, pool_reference

GRIDS = [Grid(1, 1), Grid(1, 6), Grid(5, 7), Grid(14, 14)]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("size", [1, 3, 5, 9])
@pytest.mark.parametrize("channels", [1, 5, 16, 24])
def test_equals_the_reference_also_in_gradients(grid: Grid, size: int, channels: int) -> None:
    tokens = torch.randn(2, grid.tokens, channels)
    expected = pool_reference(tokens.double(), grid, size)
    with torch.inference_mode():
        torch.testing.assert_close(pool(tokens, grid, size).double(), expected, rtol=1e-5, atol=1e-5)
    ours, theirs = tokens.clone().requires_grad_(), tokens.double().requires_grad_()
    factor, found = torch.randn_like(tokens), pool(ours, grid, size)
    assert not has_kernels() or found.grad_fn.name() == "RecordedBackward"  # type: ignore[union-attr]
    found.backward(factor)
    pool_reference(theirs, grid, size).backward(factor.double())
    assert ours.grad is not None
    assert theirs.grad is not None
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)


def test_what_is_not_contiguous_is_pooled_too() -> None:
    tokens, grid = torch.randn(2, 8, 12).transpose(1, 2), Grid(3, 4)
    torch.testing.assert_close(pool(tokens, grid, 3), pool_reference(tokens, grid, 3))


def test_differentiated_twice() -> None:
    grid, tokens = Grid(3, 4), torch.randn(1, 12, 4, requires_grad=True)
    (first,) = torch.autograd.grad(pool(tokens, grid, 3).pow(3).sum(), tokens, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), tokens)
    (plain,) = torch.autograd.grad(pool_reference(tokens, grid, 3).pow(3).sum(), tokens, create_graph=True)
    (expected,) = torch.autograd.grad(plain.square().sum(), tokens)
    torch.testing.assert_close(second, expected, rtol=1e-4, atol=1e-4)


def test_what_is_not_a_number_shows_where_it_is_seen() -> None:
    grid, tokens = Grid(4, 4), torch.zeros(1, 16, 8)
    tokens[0, 0, 3] = torch.nan
    with torch.inference_mode():
        broken = pool(tokens, grid, 3).isnan()[0, :, 3].view(4, 4)
    assert broken[:2, :2].all()
    assert int(broken.sum()) == 4
