"""The mLSTM layer between its linear layers in one walk over the tokens; `mixlab.ops.mlstm` has the references."""

from typing import NamedTuple

import torch
from torch import Tensor

from mixlab.engine.kernels import kernels, pointer, structure
from mixlab.engine.kernels.norm import Norm

BLOCK = 4  # channels of a block of the query, key and value projections
WIDTH = 16  # channels of a head come in multiples of it
CHUNK = 48  # steps that are computed at once


class Packed(NamedTuple):
    """The weights of a cell as the kernel reads them."""

    projections: Tensor  # (3, 4 turns, C)
    biases: Tensor | None  # (3, C)
    gate_weights: Tensor  # (heads, 2 gates, 2 sources, C)
    gate_biases: Tensor  # (heads, 2 gates)


MlstmAbout = structure("mlstm")


def turned(weight: Tensor) -> Tensor:
    """(blocks, out, in) of blocks of 4 as (4, C): row s has every channel's weight of its s-th neighbour."""
    places = torch.arange(BLOCK, device=weight.device)
    return torch.stack([weight[:, places, (places + by) % BLOCK].flatten() for by in range(BLOCK)])


def chunk_for(steps: int, width: int, chunk: int | None) -> int:
    """The steps of a chunk: as wanted, or by the width of a head."""
    return min(steps, chunk or max(CHUNK, width // 4))


def run_mlstm(
    source: Tensor,
    values: Tensor,
    gate: Tensor,
    packed: Packed,
    norm: Norm,
    skip: Tensor,
    *,
    eps: float,
    chunk: int | None = None,
    backwards: bool = False,
) -> Tensor:
    """(norm(cell) + skip * source) * silu(gate) of (B, T, C) each, from the first token on or from the last."""
    found, (images, steps, channels), heads = kernels(), source.shape, len(packed.gate_biases)
    assert found is not None
    out, width = source.new_empty(source.shape), channels // heads
    inputs = [one.contiguous() for one in (source, values, gate)]
    first, row = (4 * channels * (images * steps - 1), -channels) if backwards else (0, channels)
    starts = [one.data_ptr() + first for one in (*inputs, out)]
    pointers = [pointer(one) for one in (*packed, norm.weight, norm.bias, skip)]
    sizes = (images, steps, heads, width, chunk_for(steps, width, chunk), torch.get_num_threads(), 0)
    found.run("mlstm", MlstmAbout(*starts[:3], *[row] * 4, *pointers, starts[3], None, *sizes, eps, norm.eps))
    return out
