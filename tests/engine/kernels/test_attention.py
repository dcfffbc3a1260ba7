"""Softmax attention and its gradient at every level of instructions, beside the reference in double precision."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mixlab.engine.kernels.attention import attention_gradient, fits, run_attention
from mixlab.ops.attention import attention_reference
from tests.engine.kernels.test_kernels import LEVELS, at_level, near, needs_kernels


@pytest.fixture(params=LEVELS)
def lanes(request: pytest.FixtureRequest) -> Iterator[int]:
    yield from at_level(request.param)


def both_ways(qkv: Tensor, heads: int, gradient: Tensor) -> tuple[Tensor, Tensor]:
    logs = torch.empty(qkv.shape[0], heads, qkv.shape[1])
    out = run_attention(qkv, heads, logs)
    return out, attention_gradient(qkv, heads, out, logs, gradient)


def check(qkv: Tensor, heads: int, gradient: Tensor | None = None) -> None:
    channels = qkv.shape[2] // 3
    gradient = torch.randn(*qkv.shape[:2], channels) if gradient is None else gradient
    out, to_qkv = both_ways(qkv, heads, gradient)
    exact = qkv.double().requires_grad_()
    expected = attention_reference(exact, heads)
    (wanted,) = torch.autograd.grad(expected, exact, gradient.double())
    near(out, expected.detach(), 5e-6)
    largest = float(gradient.abs().max())  # of a single key no query nor key changes anything
    assert float((to_qkv - wanted).abs().max()) <= 1e-5 * max(largest, float(wanted.abs().max()))
    assert torch.equal(run_attention(qkv, heads), out)


@pytest.mark.parametrize(("heads", "width"), [(10, 32), (2, 64), (3, 20), (1, 8), (2, 48), (1, 1), (2, 130)])
@pytest.mark.parametrize(("batch", "tokens"), [(2, 49), (1, 196), (3, 1), (1, 17)])
def test_attention_and_its_gradient(lanes: int, heads: int, width: int, batch: int, tokens: int) -> None:
    check(2 * torch.randn(batch, tokens, 3 * heads * width), heads)


@pytest.mark.parametrize("tokens", [512, 513, 785, 1601])
def test_more_keys_than_are_met_at_once(lanes: int, tokens: int) -> None:
    check(2 * torch.randn(1, tokens, 3 * 2 * 12), 2)


@needs_kernels
@settings(max_examples=60, deadline=None)
@given(batch=st.integers(1, 3), tokens=st.integers(1, 90), heads=st.integers(1, 3), width=st.integers(1, 40))
def test_any_size(batch: int, tokens: int, heads: int, width: int) -> None:
    check(torch.randn(batch, tokens, 3 * heads * width), heads)


@needs_kernels
def test_what_lies_in_memory_otherwise() -> None:
    wide = torch.randn(6, 60, 100)
    check(wide[::2, ::3, 3:99], 2)
    check(wide[:, :, :96].transpose(0, 1), 2)
    check(wide[:1, :, :96].expand(3, -1, -1), 4)
    for gradient in (torch.randn(1).expand(6, 60, 32), torch.randn(60, 6, 40).transpose(0, 1)[:, :, 5:37]):
        check(wide[:, :, :96], 2, gradient)
    check(wide[:, :, :96], 2, torch.randn(6, 32, 60).transpose(1, 2))


@needs_kernels
@pytest.mark.parametrize("factor", [30.0, 1e-3])
def test_large_and_small_scores(factor: float) -> None:
    qkv = torch.randn(2, 700, 3 * 32)
    qkv[:, :, :64] *= factor
    exact = qkv.double()
    near(run_attention(qkv, 1), attention_reference(exact, 1), 1e-5 * max(1, factor))


@needs_kernels
def test_scores_that_grow_from_key_to_key() -> None:
    qkv = torch.rand(1, 1300, 3 * 16)
    qkv[..., 16:32] *= torch.linspace(-40, 40, 1300)[:, None]
    check(qkv, 1)
    check(qkv.flip(1), 1)


@pytest.mark.parametrize("tokens", [9, 700])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, -1])
def test_what_is_not_a_number_shows(lanes: int, tokens: int, value: float, place: int) -> None:
    """In the head and the image of a query, a key or a value, in all that the reference breaks, and nowhere else."""
    for part in range(3):
        qkv = torch.randn(2, tokens, 3 * 24)
        qkv[0, place, 24 * part + 8 + 3] = value
        out, to_qkv = both_ways(qkv, 3, torch.ones(2, tokens, 24))
        expected = attention_reference(qkv, 3).isfinite()
        assert not expected.all()
        assert not out[~expected].isfinite().any()
        assert not to_qkv[0].isfinite().all()
        assert out[1].isfinite().all()
        assert out[0, :, :8].isfinite().all()
        assert to_qkv[1].isfinite().all()


@needs_kernels
def test_the_same_from_run_to_run_and_with_one_thread() -> None:
    threads, gradient = torch.get_num_threads(), torch.randn(1, 900, 64)
    qkv = torch.randn(1, 900, 3 * 64)
    first = both_ways(qkv, 2, gradient)
    try:
        for count in (threads, 1, 2):
            torch.set_num_threads(count)
            for one, other in zip(both_ways(qkv, 2, gradient), first, strict=True):
                assert torch.equal(one, other)
    finally:
        torch.set_num_threads(threads)


@needs_kernels
def test_sizes_that_do_not_belong_together_are_refused() -> None:
    qkv, logs, gradient = torch.randn(2, 5, 24), torch.empty(2, 2, 5), torch.randn(2, 5, 8)
    out = run_attention(qkv, 2, logs)
    assert fits(qkv, 4)
    assert not fits(qkv, 3)
    assert not fits(qkv, 0)
    assert not fits(qkv[0], 2)
    assert not fits(qkv.mT.contiguous().mT, 2)
    with pytest.raises(ValueError, match="channels side by side"):
        run_attention(qkv, 3)
    for wrong in (logs[:1], logs.mT.contiguous().mT, torch.empty(2, 5, 2)):
        with pytest.raises(ValueError, match="contiguous"):
            run_attention(qkv, 2, wrong)
        with pytest.raises(ValueError, match="contiguous"):
            attention_gradient(qkv, 2, out, wrong, gradient)
    with pytest.raises(ValueError, match="contiguous"):
        attention_gradient(qkv, 2, out[:1], logs, gradient)
    with pytest.raises(ValueError, match="shape of what it belongs to"):
        attention_gradient(qkv, 2, out, logs, gradient[:1])
