"""What the mLSTM layer computes between its linear layers: projections by blocks, gates, cell, norm, skip and gate."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mixlab.core.guards import without_autocast
from mixlab.ops.blockdiagonal import block_diagonal, block_heads
from mixlab.ops.mlstm import mlstm_chunkwise, mlstm_parallel, mlstm_recurrent
from mixlab.ops.operator import Operator

Form = Literal["chunkwise", "parallel", "recurrent"]
FORMS: dict[Form, Callable[..., Any]] = {
    "chunkwise": mlstm_chunkwise,
    "parallel": mlstm_parallel,
    "recurrent": mlstm_recurrent,
}


class CellWeights(NamedTuple):
    """Blocks (blocks, out, in) and biases of the projections, and both gates' weights over queries, keys and values,
    input gates first: (2 * heads, 3 * C).
    """

    query: Tensor
    query_bias: Tensor | None
    key: Tensor
    key_bias: Tensor | None
    value: Tensor
    value_bias: Tensor | None
    gates: Tensor
    gate_biases: Tensor

    @property
    def heads(self) -> int:
        return len(self.gates) // 2


def folded_gates(weights: CellWeights) -> tuple[Tensor, Tensor, Tensor]:
    """Of both gates for the source and the values, (2 * heads, C) each, and their biases.

    Gates are linear in queries, keys and values, which are linear in the sources: both steps in one.
    """
    projections = (weights.query, weights.key, weights.value)
    query, key, value = (
        torch.einsum("gbo,boi->gbi", part.unflatten(1, blocks.shape[:2]), blocks).flatten(1)
        for part, blocks in zip(weights.gates.chunk(3, 1), projections, strict=True)
    )
    biases = (weights.query_bias, weights.key_bias, weights.value_bias)
    known = [bias for bias in biases if bias is not None]
    bias = torch.addmv(weights.gate_biases, weights.gates, torch.cat(known)) if known else weights.gate_biases
    return query + key, value, bias


def gates(source: Tensor, values: Tensor, weights: CellWeights) -> tuple[Tensor, Tensor]:
    """Pre-activations of input and forget gate, each (heads, B, T) in float32."""
    with without_autocast(source):
        of_source, of_values, bias = folded_gates(weights)
        flat, value_flat = (x.flatten(0, 1).to(bias.dtype) for x in (source, values))
        both = torch.addmm(bias[:, None], of_source, flat.t())
        both = torch.addmm(both, of_values, value_flat.t()).unflatten(1, source.shape[:2])
    return both[: weights.heads], both[weights.heads :]


def cell_inputs(source: Tensor, values: Tensor, weights: CellWeights) -> tuple[Tensor, ...]:
    """Queries, keys and values, each (heads, B, T, D), and both gates."""
    if source.is_meta:  # counted as it is written, not as it is done for speed
        return written_inputs(source, values, weights)
    query = block_heads(source, weights.query, weights.query_bias, weights.heads)
    key = block_heads(source, weights.key, weights.key_bias, weights.heads)
    value = block_heads(values, weights.value, weights.value_bias, weights.heads)
    return query, key, value, *gates(source, values, weights)


def written_inputs(source: Tensor, values: Tensor, weights: CellWeights) -> tuple[Tensor, ...]:
    """`cell_inputs` as the paper writes them."""
    parts = [
        block_diagonal(source, weights.query, weights.query_bias),
        block_diagonal(source, weights.key, weights.key_bias),
        block_diagonal(values, weights.value, weights.value_bias),
    ]
    both = [
        F.linear(torch.cat(parts, 2), weight, bias).permute(2, 0, 1)
        for weight, bias in zip(weights.gates.chunk(2), weights.gate_biases.chunk(2), strict=True)
    ]
    return *(part.unflatten(2, (weights.heads, -1)).permute(2, 0, 1, 3) for part in parts), *both


def head_norm(heads: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """A layer norm within each head, with a weight and bias per channel: (heads, B, T, D) in, (B, T, C) out."""
    width = heads.shape[-1]
    ones, zeros = heads.new_ones(width), heads.new_zeros(width)  # PyTorch is faster with them than without
    normed = F.layer_norm(heads, (width,), ones, zeros, eps).permute(1, 2, 0, 3)  # (B, T, heads, D)
    weight = weight.view(len(heads), -1)
    if bias is None:
        return (normed * weight).flatten(2)
    return torch.addcmul(bias.view(len(heads), -1), normed, weight).flatten(2)


def mlstm_cell(source: Tensor, values: Tensor, weights: CellWeights, form: Form, chunk: int | None) -> Tensor:
    """What the heads read from their memories, (heads, B, T, D)."""
    settings = {"chunk": chunk} if form == "chunkwise" else {}
    return FORMS[form](*cell_inputs(source, values, weights), **settings)[0]


def layer_by_parts(source: Tensor, values: Tensor, gate: Tensor, *others: Any) -> Tensor:
    """(norm(cell) + skip * source) * silu(gate), one after the other."""
    *weights, norm, norm_bias, skip, form, chunk, norm_eps = others
    mixed = head_norm(mlstm_cell(source, values, CellWeights(*weights), form, chunk or None), norm, norm_bias, norm_eps)
    return torch.addcmul(mixed, source, skip) * F.silu(gate)


MLSTM_LAYER = Operator(
    "mlstm_layer",
    layer_by_parts,
    inputs=(
        "Tensor source, Tensor values, Tensor gate, Tensor query, Tensor? query_bias, Tensor key, Tensor? key_bias, "
        "Tensor value, Tensor? value_bias, Tensor gates, Tensor gate_biases, Tensor norm, Tensor? norm_bias, "
        "Tensor skip"
    ),
    settings="str form, int chunk, float norm_eps",
)


def mlstm_layer(
    source: Tensor,
    values: Tensor,
    gate: Tensor,
    weights: CellWeights,
    norm: tuple[Tensor, Tensor | None],
    skip: Tensor,
    *,
    norm_eps: float,
    form: Form = "chunkwise",
    chunk: int | None = None,
) -> Tensor:
    """(norm(cell) + skip * source) * silu(gate) of (B, T, C) each, by a kernel where one serves.

    Queries and keys are made from `source`, values from `values`. `chunk`: steps that are computed at once.
    """
    return MLSTM_LAYER(source, values, gate, *weights, *norm, skip, form, chunk or 0, norm_eps)
