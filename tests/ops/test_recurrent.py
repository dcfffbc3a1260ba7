from typing import Any

import pytest
import torch
from torch import nn

from mixlab.ops.recurrent import GATES, Cell, Direction, recurrent, recurrent_reference
from tests.ops.agree import assert_agree

PEERS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


def directions(cell: Cell, count: int, dtype: torch.dtype = torch.float64) -> list[Direction]:
    rows = GATES[cell] * 3
    shapes = [(rows, 5), (rows, 3), (rows,), (rows,)]
    return [
        tuple((torch.randn(shape, dtype=dtype) * 0.5).requires_grad_() for shape in shapes)  # type: ignore[misc]
        for _ in range(count)
    ]


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn"])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("length", [1, 6])
def test_the_kernel_equals_the_equations_also_in_gradients(cell: Cell, count: int, length: int) -> None:
    weights = directions(cell, count)
    sequences = torch.randn(4, length, 5, dtype=torch.float64, requires_grad=True)
    fast, slow = recurrent(cell, sequences, weights), recurrent_reference(cell, sequences, weights)
    assert fast.shape == (4, length, 3 * count)
    inputs = [sequences, *(weight for direction in weights for weight in direction)]
    assert_agree(fast, slow, inputs)


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn"])
def test_weights_mean_what_they_mean_in_pytorch(cell: Cell) -> None:
    peer = PEERS[cell](5, 3, batch_first=True, bidirectional=True)
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    weights: list[Any] = [tuple(getattr(peer, name + suffix) for name in names) for suffix in ("", "_reverse")]
    sequences = torch.randn(2, 7, 5)
    torch.testing.assert_close(recurrent(cell, sequences, weights), peer(sequences)[0])


def test_shapes_are_known_without_data() -> None:
    weights: list[Any] = [
        tuple(weight.to("meta") for weight in direction) for direction in directions("lstm", 2, torch.float32)
    ]
    assert recurrent("lstm", torch.empty(4, 6, 5, device="meta"), weights).shape == (4, 6, 6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_computes_in_float32(dtype: torch.dtype) -> None:
    weights = directions("lstm", 2, torch.float32)
    sequences = torch.randn(4, 6, 5)
    expected = recurrent("lstm", sequences, weights)
    with torch.autocast("cpu", dtype):
        assert torch.equal(recurrent("lstm", sequences, weights), expected)
        assert recurrent("lstm", sequences.to(dtype), weights).dtype is torch.float32
