"""Functions with gradients of their own, asked in ways that their kernels have no part in."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mixlab.core.grid import Grid
from mixlab.engine.kernels import kernels
from mixlab.ops.attention import attention, attention_reference
from mixlab.ops.blockdiagonal import block_heads, heads_reference
from mixlab.ops.convattention import (
    conv_attention,
    conv_attention_reference,
    conv_position,
    conv_position_reference,
)
from mixlab.ops.exchange import exchange, exchange_reference
from mixlab.ops.pool import pool, pool_reference

RANDOM = torch.Generator().manual_seed(0)
GRID, GRIDS = Grid(3, 4), (Grid(3, 4), Grid(6, 2))
WEIGHT, BLOCKS, OTHER = (torch.randn(shape, generator=RANDOM) for shape in ((12, 1, 3, 3), (8, 4, 4), (2, 12, 36)))
Function = Callable[[Tensor], Tensor]
PAIRS: dict[str, tuple[tuple[int, ...], Function, Function]] = {
    "attention": ((2, 12, 36), lambda x: attention(x, 3), lambda x: attention_reference(x, 3)),
    "pool": ((2, 12, 36), lambda x: pool(x, GRID, 3), lambda x: pool_reference(x, GRID, 3)),
    "heads": ((2, 12, 32), lambda x: block_heads(x, BLOCKS, None, 2), lambda x: heads_reference(x, BLOCKS, None, 2)),
    "position": (
        (2, 12, 12),
        lambda x: conv_position(x, WEIGHT, None, GRID),
        lambda x: conv_position_reference(x, WEIGHT, None, GRID),
    ),
    "convattention": (
        (2, 12, 36),
        lambda x: conv_attention(x, [WEIGHT], [None], 3, GRID, scaled=True),
        lambda x: conv_attention_reference(x, [WEIGHT], [None], 3, GRID, scaled=True),
    ),
    "exchange": (
        (2, 12, 36),
        lambda x: exchange([x, OTHER], GRIDS)[1],
        lambda x: exchange_reference([x, OTHER], GRIDS)[1],
    ),
}
pytestmark = pytest.mark.skipif(kernels() is None, reason="there are no kernels here")


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", PAIRS)
def test_many_gradients_at_once(name: str) -> None:
    shape, ours, theirs = PAIRS[name]
    x = torch.randn(shape, requires_grad=True)
    found, expected = ours(x), theirs(x)
    gradients = torch.randn(3, *found.shape)

    def of(out: Tensor) -> Tensor:
        return torch.vmap(lambda one: torch.autograd.grad(out, x, one, retain_graph=True)[0])(gradients)

    torch.testing.assert_close(of(found), of(expected), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", PAIRS)
def test_a_gradient_that_is_watched(name: str) -> None:
    shape, ours, theirs = PAIRS[name]
    x = torch.randn(shape, requires_grad=True)
    found, expected = ours(x), theirs(x)
    gradient = torch.randn_like(expected)
    with Watch():
        (own,) = torch.autograd.grad(found, x, gradient)
    torch.testing.assert_close(own, torch.autograd.grad(expected, x, gradient)[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", PAIRS)
def test_inputs_and_gradients_that_are_expanded(name: str) -> None:
    shape, ours, theirs = PAIRS[name]
    x = torch.randn(1, *shape[1:], requires_grad=True)
    found, expected = ours(x.expand(shape)), theirs(x.expand(shape))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    gradient = torch.randn_like(expected)[:1].expand_as(expected)
    own, wanted = (torch.autograd.grad(out, x, gradient)[0] for out in (found, expected))
    torch.testing.assert_close(own, wanted, rtol=1e-3, atol=1e-4)


def test_a_single_token_with_odd_strides() -> None:
    qkv = torch.randn(4, 36, 1).transpose(1, 2).requires_grad_()
    found = conv_attention(qkv, [], [], 3, Grid(1, 1), scaled=True)
    expected = conv_attention_reference(qkv, [], [], 3, Grid(1, 1), scaled=True)
    torch.testing.assert_close(found, expected)
    gradient = torch.randn_like(expected)
    own, wanted = (torch.autograd.grad(out, qkv, gradient)[0] for out in (found, expected))
    torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-5)


def test_numbers_whose_sign_is_turned_when_they_are_read() -> None:
    x = torch.view_as_complex(torch.randn(2, 12, 36, 2)).conj().imag
    assert x.is_neg()
    with torch.inference_mode():
        torch.testing.assert_close(attention(x, 3), attention_reference(x, 3))
