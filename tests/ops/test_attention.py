from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from mixlab.core.grid import Grid
from mixlab.engine.kernels import has_wide_vectors, kernels
from mixlab.ops import attention as ops
from mixlab.ops.attention import (
    attention,
    attention_reference,
    window_attention,
    window_attention_reference,
)
from tests.ops.agree import assert_agree

needs_kernels = pytest.mark.skipif(kernels() is None, reason="there are no kernels here")


@pytest.mark.parametrize(("batch", "tokens", "heads", "width"), [(2, 30, 3, 8), (1, 1, 1, 5), (1, 600, 2, 20)])
def test_attention_is_what_is_written(batch: int, tokens: int, heads: int, width: int) -> None:
    for dtype in (torch.float32, torch.float64):
        qkv = torch.randn(batch, tokens, 3 * heads * width, dtype=dtype, requires_grad=True)
        assert_agree(attention(qkv, heads), attention_reference(qkv, heads), [qkv])
        with torch.no_grad():
            torch.testing.assert_close(attention(qkv, heads), attention_reference(qkv, heads))


def test_an_offset_is_added_to_scores() -> None:
    qkv, offset = torch.randn(2, 7, 3 * 16, requires_grad=True), torch.randn(2, 7, 7, requires_grad=True)
    weights = ops.attention_weights(*ops.split_heads(qkv, 2)[:2], offset)
    assert_agree(attention(qkv, 2, offset), ops.join_heads(weights @ ops.split_heads(qkv, 2)[2]), [qkv, offset])


@needs_kernels
def test_gradients_of_attention_can_be_differentiated() -> None:
    qkv = torch.randn(2, 5, 3 * 16, requires_grad=True)

    def second(out: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(out.square().sum(), qkv, create_graph=True)
        return torch.autograd.grad(first.square().sum(), qkv)[0]

    found = second(attention(qkv, 2))
    torch.testing.assert_close(found, second(attention_reference(qkv, 2)), rtol=1e-4, atol=1e-4)


@needs_kernels
def test_many_gradients_at_once() -> None:
    qkv, gradients = torch.randn(2, 5, 3 * 16, requires_grad=True), torch.randn(3, 2, 5, 16)
    found, wanted = (
        torch.autograd.grad(form(qkv, 2), qkv, gradients, is_grads_batched=True)[0]
        for form in (attention, attention_reference)
    )
    torch.testing.assert_close(found, wanted)


def test_gradients_in_double_precision() -> None:
    assert gradcheck(lambda x: attention(x, 2), torch.randn(1, 4, 12, dtype=torch.float64, requires_grad=True))


def test_transforms_of_attention() -> None:
    qkv, along = torch.randn(2, 5, 3 * 16), torch.randn(2, 5, 3 * 16)
    each = torch.func.vmap(lambda one: attention(one[None], 2)[0])(qkv)
    torch.testing.assert_close(each, attention_reference(qkv, 2))
    slope = torch.func.grad(lambda x: attention(x, 2).square().sum())(qkv)
    exact = torch.func.grad(lambda x: attention_reference(x, 2).square().sum())(qkv)
    torch.testing.assert_close(slope, exact)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(along.to(torch.bfloat16), 2).dtype is torch.bfloat16


def test_who_watches_operators_sees_attention() -> None:
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    for wanted in (True, False):
        qkv = torch.randn(2, 30, 3 * 16, requires_grad=wanted)
        seen.clear()
        with Watch():
            attention(qkv, 2)
        assert any("scaled_dot_product" in name for name in seen)


def test_what_the_kernel_trains() -> None:
    qkv = torch.randn(2, 5, 3 * 16, requires_grad=True)
    assert ops.ATTENTION.serves(qkv, 2, training=True) == has_wide_vectors()
    assert not ops.ATTENTION.serves(qkv.double(), 2, training=True)
    assert not ops.ATTENTION.serves(qkv[:0], 2, training=True)
    assert attention(qkv[:0], 2).shape == (0, 5, 16)


@needs_kernels
def test_what_changes_behind_its_back_is_told_of() -> None:
    qkv = torch.randn(2, 5, 3 * 16, requires_grad=True)
    inner = qkv * 1
    out = attention(inner, 2)
    inner.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@settings(max_examples=40, deadline=None)
@given(
    height=st.integers(1, 13),
    width=st.integers(1, 13),
    prefix=st.integers(0, 2),
    window=st.sampled_from([3, 5, 7]),
)
def test_tiled_window_attention_equals_masked_attention(height: int, width: int, prefix: int, window: int) -> None:
    grid = Grid(height, width, prefix)
    query, key, value = torch.randn(3, 2, 2, grid.tokens, 4, dtype=torch.float64).unbind(0)
    fast = window_attention(query, key, value, grid, window)
    torch.testing.assert_close(fast, window_attention_reference(query, key, value, grid, window))


def test_gradients_agree_too() -> None:
    grid = Grid(8, 7, 1)
    query, key, value = inputs = [
        torch.randn(1, 2, grid.tokens, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)
    ]
    fast = window_attention(query, key, value, grid, 3)
    assert_agree(fast, window_attention_reference(query, key, value, grid, 3), inputs)
