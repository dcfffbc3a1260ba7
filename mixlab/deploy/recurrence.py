"""Tracing recurrent layers by their shapes: PyTorch would unroll every step to learn them, which takes minutes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mixlab.core.compat import DispatchKey, decomposition_table
from mixlab.ops.recurrent import Cell

KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)
Sequence = list[Tensor] | tuple[Tensor, ...]


@contextmanager
def traced_by_shape(*cells: Cell) -> Iterator[None]:
    """Inside, the operators of these cells compute nothing: for tracing that keeps them as operators."""
    aten = torch.ops.aten
    known = {
        "lstm": (aten.lstm.input, lstm_shapes),
        "gru": (aten.gru.input, state_shapes),
        "rnn": (aten.rnn_tanh.input, state_shapes),
    }
    operators: dict[Any, Any] = dict(known[cell] for cell in cells)
    before = {operator: {key: operator.py_kernels.get(key) for key in KEYS} for operator in operators}
    unrolled: dict[Any, Any] = {operator: decomposition_table[operator] for operator in operators}
    try:
        for operator, kernel in operators.items():
            set_kernels(operator, dict.fromkeys(KEYS, kernel))
        decomposition_table.update(operators)
        yield
    finally:
        decomposition_table.update(unrolled)
        for operator, kernels in before.items():
            set_kernels(operator, kernels)


def set_kernels(operator: Any, kernels: dict[DispatchKey, Any]) -> None:
    for key, kernel in kernels.items():
        if kernel is None:
            operator.py_kernels.pop(key, None)
        else:
            operator.py_kernels[key] = kernel
    operator._dispatch_cache.clear()


def lstm_shapes(
    x: Tensor,
    states: Sequence,
    parameters: Sequence,
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, memory = states
    out = outputs(x, hidden, bidirectional=bidirectional, batch_first=batch_first)
    return out, torch.empty_like(hidden), torch.empty_like(memory)


def state_shapes(
    x: Tensor,
    state: Tensor,
    parameters: Sequence,
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    return outputs(x, state, bidirectional=bidirectional, batch_first=batch_first), torch.empty_like(state)


def outputs(x: Tensor, state: Tensor, *, bidirectional: bool, batch_first: bool) -> Tensor:
    """(T, N, D) in memory, whichever axis is named first."""
    width = state.shape[2] * (2 if bidirectional else 1)
    batch, steps = (x.shape[0], x.shape[1]) if batch_first else (x.shape[1], x.shape[0])
    out = x.new_empty(steps, batch, width)
    return out.transpose(0, 1) if batch_first else out
