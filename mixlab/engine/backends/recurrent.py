"""Recurrent layers over maps and the mLSTM layer by our own kernels, without gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mixlab.engine.kernels.mlstm import BLOCK, WIDTH, Packed, run_mlstm, turned
from mixlab.engine.kernels.norm import Norm
from mixlab.engine.kernels.recurrent import MOST, Run, lstm_maps
from mixlab.engine.product import why_no_product
from mixlab.engine.reasons import needs, vectors_fit, why_no_kernel
from mixlab.ops.mlstm import EPS
from mixlab.ops.mlstm_layer import MLSTM_LAYER, CellWeights, folded_gates
from mixlab.ops.operator import Backend
from mixlab.ops.recurrent import RECURRENT_MAPS, walks_of

# -- LSTM ----------------------------------------------------------------------------------------


def supports_maps(
    image: Tensor, weights: Sequence[Tensor], cell: str, vertical: Sequence[bool], backwards: Sequence[bool]
) -> str | None:
    walks = walks_of(weights, vertical, backwards)
    return (
        needs(cell == "lstm", "a cell that is no LSTM")
        or needs(len(walks) <= MOST, "more than two layers at once")
        or why_no_kernel(image, *weights)
        or needs(image.ndim == 4 and all(weight.is_contiguous() for weight in weights), "weights with gaps")
        or needs(all(directions_fit(image, *walk.weights) for walk in walks), "weights that do not fit the image")
        or why_no_product(image, weights[0], weights[2])
    )


def directions_fit(image: Tensor, inputs: Tensor, hidden: Tensor, input_bias: Tensor, hidden_bias: Tensor) -> bool:
    units = hidden.shape[-1]
    biases = input_bias.shape == hidden_bias.shape == (4 * units,)
    return biases and inputs.shape == (4 * units, image.shape[-1]) and hidden.shape == (4 * units, units)


def lstm(
    image: Tensor, weights: Sequence[Tensor], cell: str, vertical: Sequence[bool], backwards: Sequence[bool]
) -> Tensor:
    return lstm_maps(image, [Run(*walk) for walk in walks_of(weights, vertical, backwards)])


RECURRENT_MAPS.serve(Backend("kernel", supports_maps, lstm))


# -- mLSTM ---------------------------------------------------------------------------------------


def supports_mlstm(source: Tensor, values: Tensor, gate: Tensor, *others: Any) -> str | None:
    *tensors, form, _, _ = others
    weights, (norm, norm_bias, skip) = CellWeights(*tensors[:8]), tensors[8:]
    around, channels = (norm, norm_bias, skip), source.shape[-1]
    width, blocks = channels // weights.heads, (channels // BLOCK, BLOCK, BLOCK)
    return (
        needs(form == "chunkwise", "a form that is no kernel's")
        or why_no_kernel(source, values, gate, *tensors)
        or needs(source.ndim == 3 and source.shape == values.shape == gate.shape, "no tokens (B, T, C)")
        or needs(vectors_fit((channels,), *around), "a norm or skip of another width, or with gaps")
        or needs(channels % (weights.heads * WIDTH) == 0 and width > 0, "heads that are not multiples of 16 channels")
        or needs(
            weights.query.shape == weights.key.shape == weights.value.shape == blocks, f"other blocks than of {BLOCK}"
        )
        or needs(weights.gates.shape == (2 * weights.heads, 3 * channels), "gates of other channels")
    )


def mlstm(source: Tensor, values: Tensor, gate: Tensor, *others: Any) -> Tensor:
    *tensors, norm, norm_bias, skip, _, chunk, norm_eps = others
    packed, about = pack(CellWeights(*tensors)), Norm(norm, norm_bias, norm_eps)
    return run_mlstm(source, values, gate, packed, about, skip, eps=EPS, chunk=chunk or None)


@torch.no_grad()
def pack(weights: CellWeights) -> Packed:
    """The weights of a cell as the kernel reads them."""
    of_source, of_values, bias = folded_gates(weights)
    gates = torch.stack([of_source, of_values], 1).unflatten(0, (2, weights.heads)).transpose(0, 1)
    biases = [bias for bias in (weights.query_bias, weights.key_bias, weights.value_bias) if bias is not None]
    return Packed(
        torch.stack([turned(blocks) for blocks in (weights.query, weights.key, weights.value)]),
        torch.stack(biases) if biases else None,
        gates.contiguous(),
        bias.view(2, weights.heads).t().contiguous(),
    )


MLSTM_LAYER.serve(Backend("kernel", supports_mlstm, mlstm))
