import pytest
import torch

from mixlab.ops.norms import global_norm, global_norm_reference
from tests.ops.agree import assert_agree


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_global_norm_equals_its_equation_also_in_gradients(tokens: int, with_bias: bool) -> None:
    x = torch.randn(3, tokens, 10, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(10, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(10, dtype=torch.float64) if with_bias else None
    fast, slow = global_norm(x, weight, bias, 1e-6), global_norm_reference(x, weight, bias, 1e-6)
    assert_agree(fast, slow, [x, weight])
