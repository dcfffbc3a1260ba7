from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mixlab.ops.mlstm import (
    CHUNK,
    GROUP,
    State,
    chunk_size,
    mlstm_chunkwise,
    mlstm_parallel,
    mlstm_recurrent,
    mlstm_shape,
)

FORMS = [mlstm_recurrent, mlstm_parallel, mlstm_chunkwise]
FAST = [mlstm_parallel, mlstm_chunkwise]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def make(
    steps: int, *, gates: float = 1.0, dtype: torch.dtype = torch.float64, lead: tuple[int, ...] = (2, 3)
) -> Inputs:
    query, key = torch.randn(*lead, steps, 8, dtype=dtype), torch.randn(*lead, steps, 8, dtype=dtype)
    value = torch.randn(*lead, steps, 5, dtype=dtype)
    write, keep = gates * torch.randn(*lead, steps, dtype=dtype), gates * torch.randn(*lead, steps, dtype=dtype)
    return query, key, value, write, keep


def make_state(lead: tuple[int, ...] = (2, 3), dtype: torch.dtype = torch.float64) -> State:
    return State(
        torch.randn(*lead, 8, 5, dtype=dtype), torch.randn(*lead, 8, dtype=dtype), torch.randn(lead, dtype=dtype)
    )


def distance(ours: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest value."""
    assert ours.shape == expected.shape
    return float((ours.double() - expected.double()).abs().max() / expected.double().abs().max())


@pytest.mark.parametrize("form", FAST)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("gates", [1.0, 30.0])
@pytest.mark.parametrize("steps", [1, 2, 63, 64, 65, 197])
def test_three_forms_agree_in_double_precision(
    form: Any, reverse: bool, with_state: bool, gates: float, steps: int
) -> None:
    inputs, state = make(steps, gates=gates), make_state() if with_state else None
    expected, after = mlstm_recurrent(*inputs, state, reverse=reverse, final_state=True)
    ours, ended = form(*inputs, state, reverse=reverse, final_state=True)
    assert distance(ours, expected) < 1e-9
    assert after is not None
    for part, wanted in zip(ended, after, strict=True):
        assert distance(part, wanted) < 1e-9


@pytest.mark.parametrize("reverse", [False, True])
def test_states_pass_between_groups_of_chunks(reverse: bool) -> None:
    inputs, state = make(5 * GROUP + 3, lead=(2,)), make_state((2,))
    expected, after = mlstm_recurrent(*inputs, state, reverse=reverse, final_state=True)
    ours, ended = mlstm_chunkwise(*inputs, state, reverse=reverse, final_state=True, chunk=2)
    assert distance(ours, expected) < 1e-9
    assert ended is not None
    assert after is not None
    for part, wanted in zip(ended, after, strict=True):
        assert distance(part, wanted) < 1e-9


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 90), st.integers(1, 40), st.booleans(), st.booleans(), st.integers(0, 99))
def test_any_length_and_chunk_gives_the_same(steps: int, chunk: int, reverse: bool, final: bool, seed: int) -> None:
    torch.manual_seed(seed)
    inputs = make(steps, gates=4.0, lead=(2,))
    expected, _ = mlstm_recurrent(*inputs, reverse=reverse)
    ours, _ = mlstm_chunkwise(*inputs, reverse=reverse, final_state=final, chunk=chunk)
    assert distance(ours, expected) < 1e-9


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reverse", [False, True])
def test_a_sequence_in_two_parts_is_the_sequence(form: Any, reverse: bool) -> None:
    inputs = make(90)
    whole, end = form(*inputs, reverse=reverse, final_state=True)
    parts = [[tensor.narrow(2, start, length) for tensor in inputs] for start, length in ((0, 37), (37, 53))]
    first, second = parts[::-1] if reverse else parts
    start, state = form(*first, reverse=reverse, final_state=True)
    rest, after = form(*second, state, reverse=reverse, final_state=True)
    assert distance(torch.cat([rest, start] if reverse else [start, rest], 2), whole) < 1e-9
    for part, wanted in zip(after, end, strict=True):
        assert distance(part, wanted) < 1e-9


@pytest.mark.parametrize("form", FORMS)
def test_backwards_is_forwards_over_flipped_steps(form: Any) -> None:
    query, key, value, write, keep = make(70)
    ours, _ = form(query, key, value, write, keep, reverse=True)
    flipped, _ = form(query.flip(2), key.flip(2), value.flip(2), write.flip(2), keep.flip(2))
    assert distance(ours, flipped.flip(2)) < 1e-12


# Float32 against the equations in float64: usual gates, gates of +-30, and a decay of e^-1000000 over the sequence.
# Queries and keys are positive here: with any sign the divisor nearly cancels at times, in every form alike.
@pytest.mark.parametrize(
    ("gates", "shift", "bound"),
    [(1.0, 3.0, 2e-6), (30.0, 0.0, 4e-6), (1.0, -1000.0, 2e-6)],
    ids=["usual", "30", "decay"],
)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_float32_stays_close_with_extreme_gates(
    form: Any, gates: float, shift: float, bound: float, reverse: bool
) -> None:
    query, key, value, write, keep = make(1000, gates=gates)
    check_float32(form, (query.abs(), key.abs(), value, write, keep + shift), bound, reverse=reverse)


@pytest.mark.parametrize("steps", [196, 1000])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_float32_stays_close_after_a_million_steps_worth_of_decay(form: Any, reverse: bool, steps: int) -> None:
    query, key, value, write, keep = make(steps)
    first, second = (slice(steps // 2, None), slice(None, steps // 2))
    keep[..., first if reverse else second] = -2e6 / steps
    keep[..., second if reverse else first] = 5
    check_float32(form, (query.abs(), key.abs(), value, write, keep), 2e-6, reverse=reverse)


def check_float32(form: Any, inputs: tuple[torch.Tensor, ...], bound: float, *, reverse: bool) -> None:
    single = [tensor.float() for tensor in inputs]
    expected, _ = mlstm_recurrent(*[tensor.double() for tensor in single], reverse=reverse)  # type: ignore[arg-type]
    ours, _ = form(*single, reverse=reverse)
    assert ours.isfinite().all()
    assert distance(ours, expected) < bound


@pytest.mark.parametrize("form", FORMS)
def test_gradients_stay_finite_when_nothing_is_written(form: Any) -> None:
    inputs = make(70, dtype=torch.float32)
    inputs[3][..., 0] = -100
    leaves = [tensor.requires_grad_() for tensor in inputs]
    output, _ = form(*[tensor * 1 for tensor in leaves])
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(output.sum(), leaves))


@pytest.mark.parametrize("form", FORMS)
def test_leading_axes_may_be_none_or_empty(form: Any) -> None:
    for lead in ((), (0, 2)):
        output, state = form(*make(70, lead=lead), final_state=True)
        assert output.shape == (*lead, 70, 5)
        assert state.memory.shape[:-2] == lead


@pytest.mark.parametrize("form", FORMS)
def test_one_state_may_serve_many_rows(form: Any) -> None:
    inputs, state = make(70, lead=(3, 2)), make_state((1, 2))
    output, _ = form(*inputs, state)
    expected, _ = form(*inputs, State(*(part.expand(3, *part.shape[1:]) for part in state)))
    assert distance(output, expected) < 1e-12


@pytest.mark.parametrize("gates", [1.0, 30.0])
@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_agree(gates: float, reverse: bool) -> None:
    inputs, state = make(130, gates=gates, lead=(2,)), make_state((2,))
    leaves = [tensor.requires_grad_() for tensor in (*inputs, *state[:2])]
    factor = torch.randn(2, 130, 5, dtype=torch.float64)
    found = []
    for form in FORMS:
        output, _ = form(*inputs, state, reverse=reverse, eps=0.0)  # only through eps would the stabiliser matter
        found.append(torch.autograd.grad((output * factor).sum(), leaves))
    for ours in found[1:]:
        for gradient, expected in zip(ours, found[0], strict=True):
            assert distance(gradient, expected) < 1e-9


def test_inputs_may_lie_in_memory_in_any_way() -> None:
    inputs = make(70)
    strided = [torch.stack([tensor, tensor], -1)[..., 0].transpose(0, 1) for tensor in inputs]
    assert not any(tensor.is_contiguous() for tensor in strided)
    ours, _ = mlstm_chunkwise(*strided)  # type: ignore[arg-type]
    expected, _ = mlstm_recurrent(*inputs)
    assert distance(ours.transpose(0, 1), expected) < 1e-9


def test_inputs_are_not_changed() -> None:
    inputs = make(70)
    before = [tensor.clone() for tensor in inputs]
    with torch.no_grad():
        mlstm_chunkwise(*inputs)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, before, strict=True))


def test_gates_and_normaliser_stay_in_float32_under_autocast() -> None:
    inputs = make(100, dtype=torch.float32)
    expected, _ = mlstm_recurrent(*inputs)
    with torch.autocast("cpu", torch.float16):
        query, key, value = (tensor.half() for tensor in inputs[:3])
        ours, state = mlstm_chunkwise(query, key, value, *inputs[3:], final_state=True)
    assert ours.dtype is torch.float16
    assert state is not None
    assert state.normaliser.dtype is state.stabiliser.dtype is torch.float32
    assert distance(ours, expected) < 0.02


@pytest.mark.parametrize("steps", [1, 64, 144, 196, 784, 1024, 3136, 12544, 97, 9973])
def test_chunks_are_near_the_wanted_size_and_pad_little(steps: int) -> None:
    size = chunk_size(steps, 96)
    assert min(steps, CHUNK // 2) <= size <= 96 + 2 * CHUNK
    assert -steps % size <= steps // size + 1


def test_shapes_without_data_and_the_papers_count() -> None:
    from mixlab.metrics.macs import MacCounter

    counter = MacCounter()
    query, key, value = (torch.empty(4, 128, 96, device="meta") for _ in range(3))
    with counter:
        assert mlstm_shape(query, key, value).shape == (4, 128, 96)
    assert sum(counter.counts.values()) == 4 * (128 * 2 * (CHUNK // 2 + 1) * 96 + 2 * 96 * 96)


@pytest.mark.parametrize("steps", [5, 70])  # one block of rows, and two
def test_chunks_can_be_differentiated_twice(steps: int) -> None:
    leaves = [tensor.requires_grad_() for tensor in make(steps, lead=(1,))]

    def second(form: Any) -> list[Tensor]:
        output, _ = form(*leaves, eps=0.0)  # with it the stabiliser, held fixed here, would count
        first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(one.square().sum() for one in first), leaves))  # type: ignore[arg-type]

    for ours, expected in zip(second(mlstm_chunkwise), second(mlstm_recurrent), strict=True):
        assert distance(ours, expected) < 1e-8


def test_chunks_work_under_vmap_as_without() -> None:
    inputs = make(20, lead=(3, 2))
    whole, _ = mlstm_chunkwise(*inputs)
    mapped = torch.func.vmap(lambda *one: mlstm_chunkwise(*one)[0])(*inputs)
    assert distance(mapped, whole) < 1e-12
