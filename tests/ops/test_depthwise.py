from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mixlab.engine.backends.depthwise import STRIP, strip_starts
from mixlab.ops.depthwise import DEPTHWISE, depthwise


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> Tensor:
    return F.conv2d(x, weight, bias, padding=padding, groups=len(weight))


def gradients(function: Any, inputs: list[Tensor], padding: tuple[int, int]) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    x, weight, bias = [*leaves, None][:3]
    output = function(x, weight, bias, padding)
    factors = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    return [output.detach(), *torch.autograd.grad((output * factors).sum(), leaves)]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, 3, 5, 7, 9, 13]),
    st.sampled_from([1, 3, 5, 7, 9, 13]),
    st.integers(1, 17),
    st.integers(1, 17),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_gradients_are_those_of_the_plain_convolution(
    tall: int, wide: int, height: int, width: int, with_bias: bool, channels_last: bool, padded: bool
) -> None:
    padding = (tall // 2, wide // 2) if padded else (0, 0)
    height, width = (height, width) if padded else (height + tall - 1, width + wide - 1)
    x, weight, bias = torch.randn(2, 19, height, width), torch.randn(19, 1, tall, wide), torch.randn(19)
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    inputs = [x, weight, *([bias] if with_bias else [])]
    for ours, expected in zip(gradients(depthwise, inputs, padding), gradients(plain, inputs, padding), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_wide_kernels_take_the_fast_way_where_they_are_trained() -> None:
    x, wide, narrow = torch.randn(1, 4, 8, 8), torch.randn(4, 1, 7, 7), torch.randn(4, 1, 7, 3)
    assert not DEPTHWISE.serves(x, wide, None, (3, 3), training=True)
    assert DEPTHWISE.serves(x, wide.requires_grad_(), None, (3, 3), training=True)
    assert not DEPTHWISE.serves(x, narrow.requires_grad_(), None, (3, 1), training=True)


@pytest.mark.parametrize("width", range(5, 40, 2))
def test_strips_cover_every_column(width: int) -> None:
    covered = {start + column for start in strip_starts(width) for column in range(STRIP)}
    assert covered == set(range(width))


def test_gradients_can_be_differentiated_again() -> None:
    x, weight = torch.randn(1, 2, 4, 5, requires_grad=True), torch.randn(2, 1, 3, 5, requires_grad=True)

    def second(function: Any) -> list[Tensor]:
        output = function(x, weight, None, (1, 2))
        first = torch.autograd.grad(output.square().sum(), [x, weight], create_graph=True)
        return list(torch.autograd.grad(sum(one.square().sum() for one in first), [x, weight]))  # type: ignore[arg-type]

    for ours, expected in zip(second(depthwise), second(plain), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)
