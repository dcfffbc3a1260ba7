import pytest
import torch

from mixlab.engine.kernels import kernels
from mixlab.ops.blockdiagonal import BLOCK_HEADS, block_diagonal, block_heads, densify_heads, grouped_heads
from tests.ops.agree import assert_agree


@pytest.mark.parametrize(
    ("channels", "block", "heads"), [(48, 4, 2), (96, 4, 1), (20, 4, 1), (10, 5, 2), (6, 1, 3), (128, 64, 2)]
)
@pytest.mark.parametrize("biased", [True, False])
def test_heads_of_grouped_blocks_are_the_layer(channels: int, block: int, heads: int, biased: bool) -> None:
    x = torch.randn(2, 7, channels, requires_grad=True)
    weight = torch.randn(channels // block, block, block, requires_grad=True)
    bias = torch.randn(channels, requires_grad=True) if biased else None
    fast = grouped_heads(x, densify_heads(weight, heads), bias, heads)
    slow = block_diagonal(x, weight, bias).unflatten(2, (heads, -1)).permute(2, 0, 1, 3)
    assert_agree(fast, slow, [x, weight] if bias is None else [x, weight, bias])


def test_it_is_a_linear_layer_with_zeros_between_the_blocks() -> None:
    x, weight = torch.randn(3, 8), torch.randn(2, 4, 4)
    torch.testing.assert_close(block_diagonal(x, weight, None), x @ torch.block_diag(*weight).T)


@pytest.mark.skipif(kernels() is None, reason="there are no kernels here")
def test_gradients_of_trained_heads_can_be_differentiated_and_asked_for_in_part() -> None:
    x, weight, bias = torch.randn(2, 5, 32), torch.randn(8, 4, 4), torch.randn(32)
    inputs = [one.requires_grad_() for one in (x, weight, bias)]

    def second(out: torch.Tensor) -> list[torch.Tensor]:
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        return list(torch.autograd.grad(torch.stack([one.square().sum() for one in first]).sum(), inputs))

    written = block_diagonal(x, weight, bias).unflatten(2, (2, -1)).permute(2, 0, 1, 3)
    for found, one in zip(second(block_heads(x, weight, bias, 2)), second(written), strict=True):
        torch.testing.assert_close(found, one, rtol=1e-4, atol=1e-3)
    x.requires_grad_(False)
    bias.requires_grad_(False)
    block_heads(x, weight, bias, 2).sum().backward()
    assert weight.grad is not None
    assert x.grad is bias.grad is None


def test_what_the_kernel_is_not_for() -> None:
    x, weight = torch.randn(2, 5, 32, requires_grad=True), torch.randn(8, 4, 4)
    for training in (False, True):

        def serves(x: torch.Tensor, weight: torch.Tensor, heads: int, training: bool = training) -> bool:
            return BLOCK_HEADS.serves(x, weight, None, heads, training=training)

        assert serves(x, weight, 2) == (kernels() is not None)
        assert not serves(x, weight, 4)  # heads of 8 channels
        assert not serves(x, torch.randn(4, 8, 8), 2)
        assert not serves(x.double(), weight.double(), 2)
