"""Recurrent layers over many sequences at once: LSTM (Sequencer, Eqs. 1-4), GRU and tanh-RNN.

Sequences are (N, T, C). A direction has four weights: input (G D, C), hidden (G D, D) and their biases, with G gates in
PyTorch's order. The second direction runs backwards; outputs of both lie side by side, (N, T, directions * D).
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mixlab.core.compat import recurrent_kernel
from mixlab.ops.operator import Operator

Cell = Literal["lstm", "gru", "rnn"]
Direction = tuple[Tensor, Tensor, Tensor, Tensor]
GATES: dict[Cell, int] = {"lstm": 4, "gru": 3, "rnn": 1}


def recurrent_reference(cell: Cell, sequences: Tensor, directions: Sequence[Direction]) -> Tensor:
    """Step by step, as the equations are written."""
    outputs = []
    for index, weights in enumerate(directions):
        steps = sequences.unbind(1)
        steps = steps[::-1] if index else steps
        hidden = memory = sequences.new_zeros(sequences.shape[0], weights[1].shape[1])
        states = []
        for step in steps:
            hidden, memory = STEPS[cell](step, hidden, memory, *weights)
            states.append(hidden)
        outputs.append(torch.stack(states[::-1] if index else states, 1))
    return torch.cat(outputs, -1)


def lstm_step(
    x: Tensor, hidden: Tensor, memory: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor, b_h: Tensor
) -> tuple[Tensor, Tensor]:
    gates = F.linear(x, w_x, b_x) + F.linear(hidden, w_h, b_h)
    write, forget, value, read = gates.chunk(4, -1)
    memory = forget.sigmoid() * memory + write.sigmoid() * value.tanh()
    return read.sigmoid() * memory.tanh(), memory


def gru_step(
    x: Tensor, hidden: Tensor, memory: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor, b_h: Tensor
) -> tuple[Tensor, Tensor]:
    reset_x, update_x, value_x = F.linear(x, w_x, b_x).chunk(3, -1)
    reset_h, update_h, value_h = F.linear(hidden, w_h, b_h).chunk(3, -1)
    update = (update_x + update_h).sigmoid()
    value = (value_x + (reset_x + reset_h).sigmoid() * value_h).tanh()
    return (1 - update) * value + update * hidden, memory


def rnn_step(
    x: Tensor, hidden: Tensor, memory: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor, b_h: Tensor
) -> tuple[Tensor, Tensor]:
    return (F.linear(x, w_x, b_x) + F.linear(hidden, w_h, b_h)).tanh(), memory


STEPS = {"lstm": lstm_step, "gru": gru_step, "rnn": rnn_step}


def recurrent(cell: Cell, sequences: Tensor, directions: Sequence[Direction]) -> Tensor:
    """`recurrent_reference` by PyTorch's own kernels, with gradients in any mode.

    The flag that PyTorch calls `train` only decides whether cuDNN keeps what a backward pass needs; there is no dropout
    that it could switch on. Under autocast on a CPU it computes in float32: the float16 kernel raises.
    """
    if sequences.is_meta:
        return recurrent_shape(sequences, directions)
    if sequences.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            single = [tuple(weight.float() for weight in weights) for weights in directions]
            return recurrent(cell, sequences.float(), single)  # type: ignore[arg-type]
    both = len(directions) == 2
    weights = [weight for direction in directions for weight in direction]
    start = sequences.new_zeros(len(directions), sequences.shape[0], directions[0][1].shape[1])
    settings = (weights, True, 1, 0.0, torch.is_grad_enabled(), both, True)
    if cell == "lstm":
        return recurrent_kernel(cell)(sequences, (start, start), *settings)[0]
    return recurrent_kernel(cell)(sequences, start, *settings)[0]


def recurrent_shape(sequences: Tensor, directions: Sequence[Direction]) -> Tensor:
    """Without data only shapes and operator counts matter: the products of all steps at once, nothing in between."""
    outputs = []
    for w_x, w_h, b_x, b_h in directions:
        states = sequences.new_empty(*sequences.shape[:2], w_h.shape[1])
        gates = F.linear(sequences, w_x, b_x) + F.linear(states, w_h, b_h)
        outputs.append(gates[..., : w_h.shape[1]])
    return torch.cat(outputs, -1)


# -- over maps -----------------------------------------------------------------------------------


class Walk(NamedTuple):
    """A layer in one direction over the columns or the rows of a map."""

    weights: Direction
    vertical: bool
    backwards: bool


def one_by_one(
    image: Tensor, weights: Sequence[Tensor], cell: Cell, vertical: Sequence[bool], backwards: Sequence[bool]
) -> Tensor:
    """Every walk over (B, H, W, C) by itself, side by side in (B, H, W, sum of widths)."""
    outputs, walks = [], walks_of(weights, vertical, backwards)
    while walks:
        both = len(walks) > 1 and walks[0].vertical == walks[1].vertical and walks[1].backwards
        layer, walks = walks[: 1 + both], walks[1 + both :]
        lines = image.transpose(1, 2) if layer[0].vertical else image  # (B, lines, steps, C)
        mixed = recurrent(cell, lines.flatten(0, 1), [walk.weights for walk in layer]).unflatten(0, lines.shape[:2])
        outputs.append(mixed.transpose(1, 2) if layer[0].vertical else mixed)
    return torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]


def walks_of(weights: Sequence[Tensor], vertical: Sequence[bool], backwards: Sequence[bool]) -> list[Walk]:
    of_each = [tuple(weights[first : first + 4]) for first in range(0, len(weights), 4)]
    return [Walk(*walk) for walk in zip(of_each, vertical, backwards, strict=True)]  # type: ignore[arg-type]


RECURRENT_MAPS = Operator(
    "recurrent_maps",
    one_by_one,
    inputs="Tensor image, Tensor[] weights",
    settings="str cell, bool[] vertical, bool[] backwards",
)


def recurrent_maps(cell: Cell, image: Tensor, walks: Sequence[Walk]) -> Tensor:
    """All walks over a map (B, H, W, C) by a kernel where one serves. A layer's walk backwards follows its other
    one.
    """
    weights = [weight for walk in walks for weight in walk.weights]
    return RECURRENT_MAPS(image, weights, cell, [walk.vertical for walk in walks], [walk.backwards for walk in walks])
