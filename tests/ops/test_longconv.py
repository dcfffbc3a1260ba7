import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mixlab.ops import fourier, longconv
from mixlab.ops.longconv import convolve, costs, fastest, good_size, long_conv_1d, long_conv_2d, prepare_2d

FAST: list[Any] = ["matrix", "fft"]
GRIDS = [(1, 1), (1, 6), (2, 3), (7, 7), (13, 8), (14, 14), (64, 37)]
KERNELS = [(1, 1), (3, 5), (4, 2), (9, 9), (33, 81), (127, 127)]


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def distance(ours: Tensor, expected: Tensor) -> float:
    assert ours.shape == expected.shape
    return float((ours - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "taps"), [(1, 1), (5, 3), (4, 7), (6, 4), (3, 12)])
def test_the_direct_form_is_the_equation_along_a_sequence(length: int, taps: int, causal: bool) -> None:
    x, kernel, bias = double(2, length, 3), double(taps, 3), double(3)
    centre = 0 if causal else taps // 2
    expected = bias * x
    for i in range(length):
        for j in range(length):
            if 0 <= i - j + centre < taps:
                expected[:, i] += kernel[i - j + centre] * x[:, j]
    assert distance(long_conv_1d(x, kernel, bias, causal=causal, form="direct"), expected) < 1e-12


def test_the_direct_form_is_the_equation_in_the_plane() -> None:
    x, kernel, expected = double(1, 4, 3, 2), double(3, 7, 2), torch.zeros(1, 4, 3, 2, dtype=torch.float64)
    for i, j, k, m in torch.cartesian_prod(*(torch.arange(size) for size in (4, 3, 4, 3))).tolist():
        row, column = i - k + 1, j - m + 3
        if 0 <= row < 3 and 0 <= column < 7:
            expected[:, i, j] += kernel[row, column] * x[:, k, m]
    assert distance(long_conv_2d(x, kernel, form="direct"), expected) < 1e-12


@pytest.mark.parametrize("form", FAST)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_forms_agree_in_the_plane(form: Any, grid: tuple[int, int], kernel: tuple[int, int]) -> None:
    x, taps, bias = double(2, *grid, 3), double(*kernel, 3), double(3)
    expected = long_conv_2d(x, taps, bias, form="direct")
    assert distance(long_conv_2d(x, taps, bias, form=form), expected) < 1e-9


@pytest.mark.parametrize("form", FAST)
@pytest.mark.parametrize("causal", [False, True])
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 700), st.integers(1, 3))
def test_forms_agree_along_a_sequence(form: Any, causal: bool, length: int, taps: int, batch: int) -> None:
    x, kernel = double(batch, length, 2), double(taps, 2)
    expected = long_conv_1d(x, kernel, causal=causal, form="direct")
    assert distance(long_conv_1d(x, kernel, causal=causal, form=form), expected) < 1e-9


@pytest.mark.parametrize("form", FAST)
def test_gradients_agree(form: Any) -> None:
    leaves = [tensor.requires_grad_() for tensor in (double(2, 6, 5, 3), double(11, 7, 3), double(3))]
    factor = double(2, 6, 5, 3)
    gradients = [
        torch.autograd.grad((long_conv_2d(*leaves, form=one) * factor).sum(), leaves) for one in ("direct", form)
    ]
    for expected, ours in zip(*gradients, strict=True):
        assert distance(ours, expected) < 1e-9


@pytest.mark.parametrize("form", FAST)
def test_float32_keeps_its_digits_and_half_its_dtype_under_autocast(form: Any) -> None:
    x, kernel, bias = torch.randn(2, 20, 30, 4), torch.randn(39, 59, 4), torch.randn(4)
    expected = long_conv_2d(x.double(), kernel.double(), bias.double(), form="direct")
    assert distance(long_conv_2d(x, kernel, bias, form=form).double(), expected) < 2e-6
    with torch.autocast("cpu", torch.float16):
        ours = long_conv_2d(x.half(), kernel, bias, form=form)
    assert ours.dtype is torch.float16
    assert distance(ours.double(), expected) < 2e-3


def test_large_inputs_go_through_in_groups_of_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    x, kernel = torch.randn(1, 30, 40, 7), torch.randn(9, 9, 7)
    with torch.no_grad():
        expected = long_conv_2d(x, kernel, form="fft")
        monkeypatch.setattr(longconv, "FFT_NUMBERS", 3 * 40 * 48)
        torch.testing.assert_close(long_conv_2d(x, kernel, form="fft"), expected, atol=1e-4, rtol=1e-4)


def test_matrices_made_without_gradients_serve_with_them() -> None:
    fourier.kept_constant.cache_clear()
    kernel, x = torch.randn(9, 9, 2), torch.randn(1, 5, 6, 2)
    with torch.inference_mode():
        long_conv_2d(x, kernel, form="matrix")
    leaf = x.clone().requires_grad_()
    long_conv_2d(leaf, kernel, form="matrix").sum().backward()
    assert leaf.grad is not None


def test_inputs_are_not_changed_and_prepared_kernels_can_be_used_again() -> None:
    for form in ("direct", "matrix", "fft"):
        x, kernel = torch.randn(1, 5, 6, 2), torch.randn(9, 9, 2)
        before = x.clone()
        with torch.no_grad():
            ready = prepare_2d(kernel, 5, 6, form=form)
            first = convolve(x, ready)
            assert torch.equal(convolve(x, ready), first)
        assert torch.equal(x, before)


def test_the_form_is_the_fastest_that_was_measured_nearby() -> None:
    for axes, rows in costs().items():
        for row in rows:
            sizes, taps = (round(row.size),) * axes, (round(row.taps),) * axes
            chosen = fastest(sizes, taps)
            assert row.seconds[chosen] == min(row.seconds.values())
    assert fastest((56, 56), (111, 111)) == fastest((55, 57), (110, 112))
    assert fastest((300, 300), (3, 3)) == "direct"


@given(st.integers(1, 5000))
def test_transforms_have_sizes_without_large_factors(least: int) -> None:
    size = good_size(least)
    assert least <= size <= max(2 * least, 2)
    assert math.gcd(size, 2**20 * 3**12 * 5**9 * 7**8) == size
