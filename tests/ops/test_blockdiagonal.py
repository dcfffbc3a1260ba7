import pytest
import torch

from mixlab.ops.blockdiagonal import block_diagonal, densify_heads, grouped_heads
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
