from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mixlab.core.grid import Grid
from mixlab.engine.kernels import has_wide_vectors, kernels
from mixlab.ops.convattention import (
    CONV_ATTENTION,
    CONV_POSITION,
    conv_attention,
    conv_attention_reference,
    conv_position,
    conv_position_reference,
    factorised_attention,
    factorised_attention_reference,
)
from tests.ops.agree import assert_agree

needs_kernels = pytest.mark.skipif(kernels() is None, reason="there are no kernels here")


@pytest.mark.parametrize("width", [12, 66])  # heads that share a product, and heads of their own
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("softmax_query", [True, False])
def test_all_heads_at_once_equal_head_by_head_also_in_gradients(scaled: bool, softmax_query: bool, width: int) -> None:
    query, key, value = inputs = [torch.randn(2, 9, width, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    fast = factorised_attention(query, key, value, 3, scaled=scaled, softmax_query=softmax_query)
    slow = factorised_attention_reference(query, key, value, 3, scaled=scaled, softmax_query=softmax_query)
    assert_agree(fast, slow, inputs)


def test_equal_queries_get_equal_answers() -> None:
    """Eq. 4: without a position encoding the output depends on the query alone."""
    query, key, value = torch.randn(3, 1, 9, 8).unbind(0)
    query = query[:, :1].expand(-1, 9, -1)
    out = factorised_attention(query, key, value, 2)
    torch.testing.assert_close(out, out[:, :1].expand_as(out))


# -- in training ---------------------------------------------------------------------------------


def windows_of(channels: int, bias: bool) -> tuple[list[Tensor], list[Tensor | None]]:
    widths = [channels // 4, channels // 2, channels - channels // 4 - channels // 2]
    kept = [(width, size) for width, size in zip(widths, (3, 5, 7), strict=True) if width]
    weights = [torch.randn(width, 1, size, size, requires_grad=True) for width, size in kept]
    return weights, [torch.randn(width, requires_grad=True) if bias else None for width, _ in kept]


def assert_near(found: Tensor, exact: Tensor, bound: float = 1e-5) -> None:
    assert found.shape == exact.shape
    assert float((found - exact).detach().abs().max()) <= bound * max(1.0, float(exact.detach().abs().max()))


def assert_near_both_ways(out: Tensor, inputs: list[Tensor], expected: Tensor, exact: list[Tensor]) -> None:
    """Values, and gradients of inputs and of the same in double precision."""
    assert_near(out, expected)
    factor = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, exact, factor.double())
    for found, one in zip(torch.autograd.grad(out, inputs, factor), wanted, strict=True):
        assert_near(found, one)


@needs_kernels
@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 4),
    st.sampled_from([1, 3, 8, 10, 16, 19, 40]),
    st.tuples(st.integers(1, 12), st.integers(1, 12)),
    st.integers(0, 2),
    st.integers(1, 3),
    st.sampled_from(["none", "weights", "biases"]),
    st.booleans(),
)
def test_trained_attention_and_its_gradients(
    heads: int, width: int, side: tuple[int, int], prefix: int, batch: int, relative: str, scaled: bool
) -> None:
    grid, channels = Grid(*side, prefix), heads * width
    qkv = (2 * torch.randn(batch, grid.tokens, 3 * channels)).requires_grad_()
    weights, biases = windows_of(channels, relative == "biases") if relative != "none" else ([], [])
    out = conv_attention(qkv, weights, biases, heads, grid, scaled=scaled)
    inputs = [qkv, *weights, *(bias for bias in biases if bias is not None)]
    exact = [one.detach().double().requires_grad_() for one in inputs]
    count = len(weights)
    given_biases = exact[1 + count :] if relative == "biases" else [None] * count
    expected = conv_attention_reference(exact[0], exact[1 : 1 + count], given_biases, heads, grid, scaled=scaled)
    assert_near_both_ways(out, inputs, expected, exact)


@needs_kernels
@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from([1, 8, 19, 40]),
    st.tuples(st.integers(1, 12), st.integers(1, 12)),
    st.integers(0, 2),
    st.sampled_from([3, 5, 7]),
    st.booleans(),
)
def test_trained_position_and_its_gradients(
    channels: int, side: tuple[int, int], prefix: int, size: int, biased: bool
) -> None:
    grid = Grid(*side, prefix)
    tokens, weight = torch.randn(2, grid.tokens, channels), torch.randn(channels, 1, size, size)
    inputs = [one.requires_grad_() for one in (tokens, weight, torch.randn(channels))[: 2 + biased]]
    exact = [one.detach().double().requires_grad_() for one in inputs]
    out = conv_position(inputs[0], inputs[1], inputs[2] if biased else None, grid)
    expected = conv_position_reference(exact[0], exact[1], exact[2] if biased else None, grid)
    assert_near_both_ways(out, inputs, expected, exact)


@needs_kernels
def test_trained_attention_walks_what_lies_otherwise() -> None:
    grid, (weights, biases) = Grid(3, 4, 1), windows_of(12, True)
    qkv = torch.randn(36, 13, 2).permute(2, 1, 0).requires_grad_()
    gradient = torch.randn(12, 13, 2).permute(2, 1, 0)
    for first, second in zip(
        torch.autograd.grad(conv_attention(qkv, weights, biases, 3, grid, scaled=True), [qkv, *weights], gradient),
        torch.autograd.grad(conv_attention_reference(qkv, weights, biases, 3, grid), [qkv, *weights], gradient),
        strict=True,
    ):
        assert_near(first, second)


@needs_kernels
def test_gradients_of_training_can_be_differentiated_and_asked_for_in_part() -> None:
    grid, (weights, biases) = Grid(3, 4, 1), windows_of(12, True)
    qkv, tokens = torch.randn(2, 13, 36, requires_grad=True), torch.randn(2, 13, 12, requires_grad=True)
    kernel, bias = torch.randn(12, 1, 3, 3, requires_grad=True), torch.randn(12, requires_grad=True)

    def second(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        return list(torch.autograd.grad(torch.stack([one.square().sum() for one in first]).sum(), inputs))

    inputs = [qkv, *weights, *(one for one in biases if one is not None)]
    ours = second(conv_attention(qkv, weights, biases, 3, grid, scaled=True), inputs)
    ours += second(conv_position(tokens, kernel, bias, grid), [tokens, kernel, bias])
    written = second(conv_attention_reference(qkv, weights, biases, 3, grid), inputs)
    written += second(conv_position_reference(tokens, kernel, bias, grid), [tokens, kernel, bias])
    for found, one in zip(ours, written, strict=True):
        assert_near(found, one)
    conv_attention(qkv.detach(), weights, [None] * 3, 3, grid, scaled=True).sum().backward()
    conv_position(tokens, kernel.detach(), bias, grid).sum().backward()
    assert weights[0].grad is not None
    assert tokens.grad is not None
    assert bias.grad is not None
    assert qkv.grad is kernel.grad is biases[0].grad is None  # type: ignore[union-attr]


@needs_kernels
def test_many_gradients_of_training_at_once() -> None:
    grid, (weights, biases) = Grid(3, 4, 1), windows_of(12, True)
    qkv, many = torch.randn(2, 13, 36, requires_grad=True), torch.randn(5, 2, 13, 12)
    out = conv_attention(qkv, weights, biases, 3, grid, scaled=True)
    (together,) = torch.autograd.grad(out, qkv, many, is_grads_batched=True, retain_graph=True)
    for found, gradient in zip(together, many, strict=True):
        assert_near(found, torch.autograd.grad(out, qkv, gradient, retain_graph=True)[0])


def test_what_the_kernels_of_training_are_not_for() -> None:
    grid, (weights, biases), qkv = Grid(3, 4, 1), windows_of(12, True), torch.randn(2, 13, 36, requires_grad=True)

    def may(qkv: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], heads: int, grid: Grid) -> bool:
        return CONV_ATTENTION.serves(qkv, [*weights, *biases], heads, grid, True, False, training=True)

    position = CONV_POSITION.serves(qkv, *wide(36), grid, training=True)
    assert may(qkv, weights, biases, 3, grid) == position == has_wide_vectors()
    assert not may(qkv, weights, biases, 5, grid)
    assert not may(qkv, weights, biases, 3, Grid(4, 4, 1))
    assert not may(qkv, weights[:2], biases[:2], 3, grid)
    assert not may(qkv, [torch.randn(12, 1, 9, 9)], [None], 3, grid)
    assert not may(qkv, [torch.randn(12, 1, 3, 5)], [None], 3, grid)
    assert not may(qkv, [torch.randn(12, 1, 3, 3)], [torch.randn(11)], 3, grid)
    assert not may(qkv.double(), weights, biases, 3, grid)
    assert not may(qkv.to("meta"), weights, biases, 3, grid)


def wide(channels: int) -> tuple[Tensor, None]:
    return torch.randn(channels, 1, 3, 3), None


@needs_kernels
def test_what_is_not_a_number_shows_in_gradients() -> None:
    qkv = torch.randn(1, 12, 36)
    qkv[0, 5, 12 + 1] = torch.nan  # a key of the first of three heads
    out = conv_attention(qkv.requires_grad_(), [], [], 3, Grid(3, 4), scaled=True)
    (gradient,) = torch.autograd.grad(out, qkv, torch.ones_like(out))
    broken = gradient.isnan().unflatten(2, (3, 3, 4)).any(4).any(1)[0]  # of query, key and value: heads
    assert broken[:, 0].all()
    assert not broken[:, 1:].any()
