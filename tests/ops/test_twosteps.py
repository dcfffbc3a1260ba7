"""The transform in two steps agrees with the convolution as it is written."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mixlab.ops.longconv import Span, fit, long_conv_1d
from mixlab.ops.twosteps import convolve_two_steps, layout, prepare_two_steps


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 70), st.integers(1, 150), st.booleans(), st.integers(1, 3))
def test_it_is_the_same_convolution(length: int, taps: int, causal: bool, batch: int) -> None:
    generator = torch.Generator().manual_seed(length * taps)
    x = torch.randn(batch, length, 3, generator=generator)
    kernel = torch.randn(taps, 3, generator=generator) / taps**0.5
    (span,), own = fit(kernel, (length,), (0 if causal else taps // 2,))
    found = convolve_two_steps(x, prepare_two_steps(own, span), span)
    torch.testing.assert_close(found, long_conv_1d(x, kernel, causal=causal, form="direct"), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [784, 3136])
def test_long_sequences_keep_their_digits(length: int) -> None:
    x, kernel = torch.randn(1, length, 2), torch.randn(2 * length - 1, 2) / length**0.5
    (span,), own = fit(kernel, (length,), (length - 1,))
    expected = long_conv_1d(x.double(), kernel.double(), form="fft")
    assert (convolve_two_steps(x, prepare_two_steps(own, span), span) - expected).abs().max() < 1e-5


def test_the_circle_is_long_enough_and_far_cheaper_than_one_step() -> None:
    span = Span(3136, 3135, 3135)
    rows, columns = layout(span)
    assert rows * columns >= span.period
    assert rows + columns < span.period / 20
