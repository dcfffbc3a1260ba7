"""A fast path and its reference, compared."""

from collections.abc import Sequence

import torch
from torch import Tensor


def assert_agree(fast: Tensor, slow: Tensor, inputs: Sequence[Tensor]) -> None:
    """Equal values, and equal gradients for every input under one random weighting of the output."""
    torch.testing.assert_close(fast, slow)
    factor = torch.randn_like(slow)
    ours = torch.autograd.grad((fast * factor).sum(), inputs, allow_unused=True)
    reference = torch.autograd.grad((slow * factor).sum(), inputs, allow_unused=True)
    for gradient, expected in zip(ours, reference, strict=True):
        torch.testing.assert_close(gradient, expected)
