"""Patches, copies and means of tokens at every level of instructions."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from mixlab.engine.kernels.tokens import Patch, cut_patches, mean_tokens, put_tokens
from tests.engine.kernels.test_kernels import LEVELS, at_level, near


@pytest.fixture(params=LEVELS, autouse=True)
def lanes(request: pytest.FixtureRequest) -> Iterator[int]:
    yield from at_level(request.param)


@pytest.mark.parametrize("size", [(1, 1), (7, 9), (16, 33)])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(7, 4, 2), (3, 2, 1), (2, 2, 0), (4, 4, 2), (1, 1, 0)])
@pytest.mark.parametrize("channels_first", [True, False])
@pytest.mark.parametrize("channels", [3, 20])
def test_patches_make_a_convolution_of_a_product(
    size: tuple[int, int], kernel: int, stride: int, padding: int, channels_first: bool, channels: int
) -> None:
    if min(size) + 2 * padding < kernel:
        pytest.skip("no patch fits")
    x, weight = torch.randn(2, channels, *size), torch.randn(5, channels, kernel, kernel)
    flat = (weight if channels_first else weight.permute(0, 2, 3, 1)).flatten(1)
    expected = F.conv2d(x.double(), weight.double(), stride=stride, padding=padding).flatten(2).mT
    patch = Patch(kernel, kernel, stride, (padding, padding), channels_first)
    for image in (x, x.contiguous(memory_format=torch.channels_last), torch.cat([x, x], 3)[..., : size[1]]):
        near((cut_patches(image, patch).double() @ flat.double().t()).float(), expected)


def test_zeros_after_the_map_complete_its_patches() -> None:
    x, patch = torch.randn(1, 3, 5, 6), Patch(4, 4, 4, (0, 0), channels_first=True)
    padded = F.pad(x, (0, 2, 0, 3))
    assert cut_patches(x, patch, (3, 2)).equal(cut_patches(padded, patch))


@pytest.mark.parametrize("tokens", [1, 49, 200])
@pytest.mark.parametrize("width", [1, 20, 130])
def test_means_of_tokens(tokens: int, width: int) -> None:
    x = torch.randn(3, tokens + 1, width)
    near(mean_tokens(x[:, 1:]), x[:, 1:].double().mean(1))


@pytest.mark.parametrize("width", [5, 64])
def test_tokens_are_put_and_added_where_they_belong(width: int) -> None:
    x, y, out = torch.randn(3, 40, width), torch.randn(1, 40, width), torch.ones(3, 41, width)
    put_tokens(x, y.expand(3, -1, -1), out[:, 1:])
    assert out[:, 1:].equal(x + y)
    assert bool((out[:, 0] == 1).all())
    put_tokens(y[:, :1].expand(3, -1, -1), None, out[:, :1])
    assert out[:, 0].equal(y[:, 0].expand(3, -1))
