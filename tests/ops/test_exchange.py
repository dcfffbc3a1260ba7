import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mixlab.core.grid import Grid
from mixlab.engine.kernels import kernels
from mixlab.ops.exchange import exchange, exchange_reference

needs_kernels = pytest.mark.skipif(kernels() is None, reason="there are no kernels here")
SIDES = st.lists(st.tuples(st.integers(1, 17), st.integers(1, 17)), min_size=2, max_size=3)


def updates_on(grids: list[Grid], channels: int, batch: int = 2) -> list[Tensor]:
    return [torch.randn(batch, grid.tokens, channels, requires_grad=True) for grid in grids]


def is_ours(out: Tensor) -> bool:
    return "Recorded" in type(out.grad_fn).__name__


@needs_kernels
@settings(deadline=None, max_examples=40)
@given(SIDES, st.integers(0, 2), st.integers(1, 40), st.integers(1, 2))
def test_sums_on_every_grid_and_their_gradients(
    sides: list[tuple[int, int]], prefix: int, channels: int, batch: int
) -> None:
    grids = [Grid(*side, prefix) for side in sides]
    updates = updates_on(grids, channels, batch)
    sums = exchange(updates, grids)
    assert all(is_ours(out) for out in sums)
    exact = [one.detach().double().requires_grad_() for one in updates]
    expected = exchange_reference(exact, grids)
    factors = [torch.randn_like(out) for out in sums]
    ours = torch.autograd.grad(sums, updates, factors)
    wanted = torch.autograd.grad(expected, exact, [one.double() for one in factors])
    for found, one in zip((*sums, *ours), (*expected, *wanted), strict=True):
        torch.testing.assert_close(found.double(), one, rtol=1e-5, atol=2e-5)
    with torch.no_grad():
        for found, one in zip(exchange(updates, grids), sums, strict=True):
            assert torch.equal(found, one)


@needs_kernels
def test_gradients_can_be_differentiated_and_asked_for_in_part() -> None:
    grids = [Grid(4, 6, 1), Grid(2, 3, 1)]
    updates = updates_on(grids, 3)

    def second(sums: list[Tensor]) -> list[Tensor]:
        outputs = torch.stack([one.pow(3).sum() for one in sums]).sum()
        first = torch.autograd.grad(outputs, updates, create_graph=True)
        return list(torch.autograd.grad(torch.stack([one.square().sum() for one in first]).sum(), updates))

    for found, one in zip(second(exchange(updates, grids)), second(exchange_reference(updates, grids)), strict=True):
        torch.testing.assert_close(found, one, rtol=1e-4, atol=1e-3)
    updates[0] = updates[0].detach()
    exchange(updates, grids)[0].sum().backward()
    assert updates[0].grad is None
    assert updates[1].grad is not None


@needs_kernels
def test_many_gradients_at_once() -> None:
    grids = [Grid(4, 6, 1), Grid(2, 3, 1)]
    updates = updates_on(grids, 3)
    sums, many = exchange(updates, grids), torch.randn(5, 2, grids[0].tokens, 3)
    together = torch.autograd.grad(sums[0], updates, many, is_grads_batched=True, retain_graph=True)
    for index, gradient in enumerate(many):
        alone = torch.autograd.grad(sums[0], updates, gradient, retain_graph=True)
        for found, one in zip(together, alone, strict=True):
            torch.testing.assert_close(found[index], one)


def test_what_the_kernel_is_not_for() -> None:
    grids = [Grid(4, 6), Grid(2, 3)]
    updates = updates_on(grids, 3)
    assert is_ours(exchange(updates, grids)[0]) == (kernels() is not None)
    assert not is_ours(exchange([one.double() for one in updates], grids)[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_ours(exchange(updates, grids)[0])
    assert exchange([one.to("meta") for one in updates], grids)[0].is_meta
    with pytest.raises(RuntimeError):  # PyTorch's own words
        exchange([updates[0], torch.randn(2, 6, 4)], grids)


@needs_kernels
def test_what_is_not_a_number_shows() -> None:
    grids = [Grid(4, 4), Grid(2, 2)]
    updates = [one.detach() for one in updates_on(grids, 3)]
    updates[1][0, 0, 1] = torch.nan
    fine, coarse = exchange(updates, grids)
    assert fine.isnan().any()
    assert coarse.isnan().sum() == 1
