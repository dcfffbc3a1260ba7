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


@pytest.mark.parametrize("channels", [10, 32])
def test_global_norm_in_inference(channels: int) -> None:
    x, weight, bias = torch.randn(2, 70, channels), torch.randn(channels), torch.randn(channels)
    with torch.inference_mode():
        found = global_norm(x, weight, bias, 1e-6)
        strided = global_norm(x.transpose(0, 1), weight, bias, 1e-6)
    torch.testing.assert_close(found, global_norm_reference(x, weight, bias, 1e-6), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        strided, global_norm_reference(x.transpose(0, 1), weight, bias, 1e-6), rtol=1e-4, atol=1e-4
    )


def test_global_norm_without_a_weight() -> None:
    x = torch.randn(2, 9, 16)
    with torch.inference_mode():
        found = global_norm(x, None, None, 1e-6)
    torch.testing.assert_close(found, global_norm_reference(x, torch.ones(16), None, 1e-6), rtol=1e-4, atol=1e-4)
