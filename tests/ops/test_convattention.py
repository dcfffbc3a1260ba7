import pytest
import torch

from mixlab.ops.convattention import factorised_attention, factorised_attention_reference
from tests.ops.agree import assert_agree


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("softmax_query", [True, False])
def test_all_heads_at_once_equal_head_by_head_also_in_gradients(scaled: bool, softmax_query: bool) -> None:
    query, key, value = inputs = [torch.randn(2, 9, 12, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    fast = factorised_attention(query, key, value, 3, scaled=scaled, softmax_query=softmax_query)
    slow = factorised_attention_reference(query, key, value, 3, scaled=scaled, softmax_query=softmax_query)
    assert_agree(fast, slow, inputs)


def test_equal_queries_get_equal_answers() -> None:
    """Eq. 4: without a position encoding the output depends on the query alone."""
    query, key, value = torch.randn(3, 1, 9, 8).unbind(0)
    query = query[:, :1].expand(-1, 9, -1)
    out = factorised_attention(query, key, value, 2)
    torch.testing.assert_close(out, out[:, :1].expand_as(out))
