import pytest
import torch
import torch.nn.functional as F

from mixlab.ops.convattention import depthwise_in_one, factorised_attention, factorised_attention_reference
from tests.ops.agree import assert_agree


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


@pytest.mark.parametrize("bias", [False, True])
def test_kernels_of_several_sizes_in_one_convolution(bias: bool) -> None:
    sizes, widths = (3, 5, 7), (2, 3, 3)
    x = torch.randn(2, sum(widths), 9, 6, dtype=torch.float64)
    weights = [torch.randn(width, 1, size, size).double() for width, size in zip(widths, sizes, strict=True)]
    biases = [torch.randn(width).double() if bias else None for width in widths]
    apart = [
        F.conv2d(part, weight, offset, padding=weight.shape[-1] // 2, groups=len(weight))
        for part, weight, offset in zip(x.split(widths, 1), weights, biases, strict=True)
    ]
    torch.testing.assert_close(depthwise_in_one(x, weights, biases), torch.cat(apart, 1))
