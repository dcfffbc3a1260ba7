import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mixlab.grid import Grid
from mixlab.ops.attention import window_attention, window_attention_reference
from tests.ops.agree import assert_agree


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
