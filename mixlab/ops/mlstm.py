"""The mLSTM cell (Vision-LSTM, Eqs. 1-12) in three forms that compute the same: recurrent, parallel and chunkwise.

Queries and keys are (..., T, D), values (..., T, V), the gates' pre-activations (..., T), with the same leading axes.
As in the released code the forget gate is a sigmoid, keys are divided by sqrt(D), Eq. 10 reads m = max(log f + m,
log i), and the normaliser is max(|n q|, exp(-m)) + eps. `reverse` runs from the last step to the first.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mixlab.core.guards import is_exported, without_autocast
from mixlab.ops.operator import Backend, Flat, Operator, TrainingBackend

EPS = 1e-6
CHUNK = 64  # steps that are computed in parallel; the paper's count of operations assumes it (B.2)
GROUP = 16  # chunks that are computed at once
MOST = 80.0  # the largest exponent that is taken: its gradient is finite in float32
LEAST = -60.0  # the smallest logarithm of a weight that is told from nothing
NARROW = 40.0  # how much a stabiliser may grow within a chunk for its decay to be split
NEVER = -1e30  # the logarithm of nothing: finite, so that differences of two of them are


class State(NamedTuple):
    """What a sequence leaves behind: C transposed (..., D, V), n (..., D) and m (...), stabilised by exp(-m)."""

    memory: Tensor
    normaliser: Tensor
    stabiliser: Tensor


Result = tuple[Tensor, State | None]


# -- the equations -------------------------------------------------------------------------------


def mlstm_recurrent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    input_gate: Tensor,
    forget_gate: Tensor,
    state: State | None = None,
    *,
    reverse: bool = False,
    final_state: bool = False,
    eps: float = EPS,
) -> Result:
    """Step by step, as the equations are written: T products of D x V."""
    key = key * key.shape[-1] ** -0.5
    log_input, log_forget = exact(input_gate), F.logsigmoid(exact(forget_gate))
    memory, normaliser, stabiliser = empty_state(query, value) if state is None else state
    steps = range(query.shape[-2])
    outputs: dict[int, Tensor] = {}
    for t in reversed(steps) if reverse else steps:
        before = log_forget[..., t] + stabiliser
        stabiliser = torch.maximum(before, log_input[..., t])  # Eq. 10
        write = (log_input[..., t] - stabiliser).exp()[..., None]  # Eq. 11
        keep = (before - stabiliser).exp()[..., None]  # Eq. 12
        written = (write * key[..., t, :])[..., None] * value[..., t, None, :]
        memory = keep[..., None] * memory + written  # Eq. 1
        normaliser = keep * normaliser + write * key[..., t, :]  # Eq. 2
        read = (query[..., t, :, None] * memory).sum(-2)  # Eq. 3
        size = (query[..., t, :] * normaliser).sum(-1)
        outputs[t] = read / divisor(size, stabiliser, eps)[..., None]
    output = torch.stack([outputs[t] for t in steps], -2).to(value.dtype)
    return output, State(memory, normaliser, stabiliser) if final_state else None


def mlstm_parallel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    input_gate: Tensor,
    forget_gate: Tensor,
    state: State | None = None,
    *,
    reverse: bool = False,
    final_state: bool = False,
    eps: float = EPS,
) -> Result:
    """All steps at once through T x T matrices: quadratic in the length."""
    if reverse:
        inputs = (query, key, value, input_gate, forget_gate)
        return backwards(mlstm_parallel, inputs, state, final_state=final_state, eps=eps)
    with without_autocast(query):
        key, dtype = key * key.shape[-1] ** -0.5, torch.promote_types(query.dtype, torch.float32)
        log_input, decay = wide(input_gate), F.logsigmoid(wide(forget_gate)).cumsum(-1)
        weights = decay[..., :, None] - decay[..., None, :] + log_input[..., None, :]
        later = torch.ones_like(weights, dtype=torch.bool).triu(1)
        weights = weights.masked_fill(later, -torch.inf)
        memory, normaliser, start = empty_state(query, value) if state is None else state
        carried = decay + start[..., None]
        stabiliser = torch.maximum(weights.amax(-1), carried)
        weights = (weights - stabiliser[..., None]).exp().to(dtype)
        carried, stabiliser = (carried - stabiliser).exp().to(dtype), stabiliser.to(dtype)
        scores = (query @ key.mT) * weights
        read = scores @ value.to(scores.dtype) + carried[..., None] * (query.to(memory.dtype) @ memory)
        size = scores.sum(-1) + carried * (query.to(normaliser.dtype) @ normaliser[..., None])[..., 0]
        output = (read / divisor(size, stabiliser, eps)[..., None]).to(value.dtype)
        if not final_state:
            return output, None
        written = key * weights[..., -1, :, None]
        memory = carried[..., -1, None, None] * memory + written.mT @ value.to(written.dtype)
        normaliser = carried[..., -1, None] * normaliser + written.sum(-2)
        return output, State(memory, normaliser, stabiliser[..., -1])


def backwards(form: Callable[..., Result], inputs: tuple[Tensor, ...], state: State | None, **settings: Any) -> Result:
    """A form over flipped steps."""
    *sequences, input_gate, forget_gate = inputs
    flipped = [*(sequence.flip(-2) for sequence in sequences), input_gate.flip(-1), forget_gate.flip(-1)]
    output, after = form(*flipped, state, **settings)
    return output.flip(-2), after


def exact(gate: Tensor) -> Tensor:
    """Gates are exponents: float32 at least."""
    return gate if gate.dtype is torch.float64 else gate.float()


def wide(gate: Tensor) -> Tensor:
    """Sums of gates run over many steps: double precision, where the device has it."""
    return exact(gate) if gate.device.type == "mps" else gate.double()


def divisor(size: Tensor, stabiliser: Tensor, eps: float) -> Tensor:
    """max(|n q|, 1) in units of exp(-m)."""
    return torch.maximum(size.abs(), (-stabiliser).clamp(max=MOST).exp()) + eps


def empty_state(query: Tensor, value: Tensor) -> State:
    """Nothing seen yet."""
    lead, dtype = query.shape[:-2], torch.promote_types(query.dtype, torch.float32)
    memory = query.new_zeros(*lead, query.shape[-1], value.shape[-1], dtype=dtype)
    return State(memory, memory[..., 0], query.new_full(lead, NEVER, dtype=dtype))


# -- the fast form -------------------------------------------------------------------------------


def mlstm_chunkwise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    input_gate: Tensor,
    forget_gate: Tensor,
    state: State | None = None,
    *,
    reverse: bool = False,
    final_state: bool = False,
    eps: float = EPS,
    chunk: int | None = None,
) -> Result:
    """Parallel inside chunks of steps, recurrent between them (section 2.2): linear in the length.

    The stabiliser carries no gradient, since the output does not depend on it. `chunk` is the number of steps in a
    chunk, by default from the length.
    """
    if query.is_meta:
        return mlstm_shape(query, key, value), empty_state(query, value) if final_state else None
    if reverse:
        inputs = (query, key, value, input_gate, forget_gate)
        return backwards(mlstm_chunkwise, inputs, state, final_state=final_state, eps=eps, chunk=chunk)
    steps = query.shape[-2]
    if not steps:
        return value, (state or empty_state(query, value)) if final_state else None
    size = chunk_size(steps, query.shape[-1]) if chunk is None else min(chunk, steps)
    outputs = []
    with without_autocast(query):
        for first in range(0, steps, GROUP * size):
            here, last = slice(first, first + GROUP * size), first + GROUP * size >= steps
            sequences = (query[..., here, :], key[..., here, :], value[..., here, :])
            gates = (input_gate[..., here], forget_gate[..., here])
            output, state = read_group(*sequences, *gates, state, size, eps, final_state=final_state or not last)
            outputs.append(output)
    return torch.cat(outputs, -2) if len(outputs) > 1 else outputs[0], state if final_state else None


def read_group(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    input_gate: Tensor,
    forget_gate: Tensor,
    state: State | None,
    size: int,
    eps: float,
    *,
    final_state: bool,
) -> Result:
    """A few chunks of `size` steps at once: few enough for what they need to stay near the processor."""
    lead, steps = query.shape[:-2], query.shape[-2]
    dtype = torch.promote_types(query.dtype, torch.float32)
    query, key, value = (cut(sequence, size) for sequence in (query, key, value))  # each (X, chunks, S, D)
    decay = cut(F.logsigmoid(wide(forget_gate))[..., None], size)[..., 0].cumsum(-1)  # (X, chunks, S)
    gain = cut(wide(input_gate)[..., None], size, NEVER)[..., 0] - decay  # as seen from the start of the chunk
    peak = running_max(gain.detach())
    front, after = None, None
    if query.shape[1] > 1 or state is not None or final_state:
        written = written_by_chunks(key, value, decay_weight(gain - peak[..., -1:]).to(dtype))
        begun = None if state is None else flat_state(state, lead)
        front, after = carry(written, decay[..., -1], peak[..., -1], begun, final_state=final_state)
        peak = torch.maximum(peak, front.stabiliser.detach()[..., None])
    output, norm, over = read_own_chunk(query, key, value, gain, peak)
    if front is not None:
        carried = (decay_weight(front.stabiliser[..., None] - peak) / over)[..., None]
        read = query * carried.to(query.dtype)
        output = add_product(output, read, front.memory.to(read.dtype))
        norm = norm + (read * front.normaliser[..., None, :]).sum(-1)
    share = (over / divisor(norm * over, (decay + peak).to(dtype), eps))[..., None].to(output.dtype)
    output = output * share if torch.is_grad_enabled() else output.mul_(share)
    output = output.flatten(1, 2)[:, :steps].reshape(*lead, steps, value.shape[-1])
    return output, None if after is None else State(*(part.to(dtype).reshape(lead + part.shape[1:]) for part in after))


def running_max(values: Tensor) -> Tensor:
    """The largest value up to each place of the last axis. ONNX has no such operator: there, by doubling the reach."""
    if not is_exported():
        return values.cummax(-1).values
    reach, places = 1, values.shape[-1]
    while reach < places:
        values = torch.cat([values[..., :reach], torch.maximum(values[..., reach:], values[..., :-reach])], -1)
        reach *= 2
    return values


def rounding(more: Tensor, less: Tensor) -> Tensor:
    """The factor between exp of a logarithm and of the same with fewer digits; large ones lose too many."""
    dtype = torch.float64 if more.dtype is less.dtype else torch.float32
    return (more - less).detach().clamp(-MOST, MOST).exp().to(dtype)


def chunk_size(steps: int, width: int) -> int:
    """Steps per chunk for a length and a head's width: what was fastest on two cores.

    While the state is larger than what it replaces, one chunk for all. Else a divisor of the length, so that nothing is
    padded, near `CHUNK` or a third of the width; without one, chunks of equal size up to that.
    """
    if steps <= width + 2 * CHUNK:
        return steps
    wanted = max(CHUNK, width // 3)
    divisors = [size for size in range(wanted // 2, 3 * wanted // 2 + 1) if steps % size == 0]
    return min(divisors, key=lambda size: abs(size - wanted)) if divisors else -(-steps // -(-steps // wanted))


def cut(sequence: Tensor, size: int, padding: float = 0.0) -> Tensor:
    """(..., T, D) as (X, chunks, size, D), padded at the end."""
    steps, flat = sequence.shape[-2], sequence.reshape(math.prod(sequence.shape[:-2]), *sequence.shape[-2:])
    if steps % size:
        flat = F.pad(flat, (0, 0, 0, -steps % size), value=padding)
    return flat.contiguous().unflatten(1, (flat.shape[1] // size, size))


def read_own_chunk(
    query: Tensor, key: Tensor, value: Tensor, gain: Tensor, peak: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What steps read from their own chunk, its share of n q, and a factor that both still lack."""
    plain = query.dtype is key.dtype is value.dtype and query.dtype in (torch.float32, torch.float64)
    if plain and DECAY_IS_NARROW(peak):
        level = ((peak[..., :1] + peak[..., -1:]) / 2).detach()
        write = (gain - level).clamp(min=LEAST).exp()[..., None].to(key.dtype)
        over = ((level - peak).exp() * query.shape[-1] ** -0.5).to(query.dtype)
        return *CAUSAL_PRODUCT(query, key * write, value), over
    dtype = torch.promote_types(query.dtype, torch.float32)
    near, high = gain.to(dtype), peak.to(dtype)
    lost, over = rounding(gain, near), rounding(high, peak)
    return *read_within(query, key * lost[..., None].to(key.dtype), value, near, high), over


# Whether the decay from step to step, exp(gain_j - peak_t), may be split into two factors that stay in range. Looking
# is for free on a CPU only: other devices would have to wait, and what follows the arithmetic cannot look at all.
DECAY_IS_NARROW = Operator("decay_is_narrow", lambda peak: False, inputs="Tensor peak", output="bool")
DECAY_IS_NARROW.serve(
    Backend(
        "look",
        lambda peak: None if peak.numel() else "nothing to look at",
        lambda peak: bool(peak[..., -1].sub(peak[..., 0]).max() < NARROW),
    )
)


def causal_product(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The causal part of query key^T, times the values and summed over the keys."""
    scores = (query @ key.mT).tril()
    return scores @ value, scores.sum(-1)


def causal_gradient(gradients: list[Tensor], inputs: Flat, needed: list[bool]) -> Flat:
    (output, norm), (query, key, value) = gradients, inputs
    assert query is not None
    assert key is not None
    assert value is not None
    inner = (output @ value.mT + norm[..., None]).tril()
    return [inner @ key, inner.mT @ query, (query @ key.mT).tril().mT @ output]


CAUSAL_PRODUCT = Operator(
    "causal_product",
    causal_product,
    inputs="Tensor query, Tensor key, Tensor value",
    output="(Tensor, Tensor)",
    gradient=causal_gradient,
    kernels_only=False,
)


def product_by_rows(query: Tensor, key: Tensor, value: Tensor) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    """The same, where later steps cost nothing; and the scores."""
    blocks = row_blocks(query.shape[2])
    scores = [causal_(query[..., here, :] @ key[..., seen, :].mT, here.start) for here, seen in blocks]
    outputs = [score @ value[..., seen, :] for score, (_, seen) in zip(scores, blocks, strict=True)]
    return (joined(outputs), joined([score.sum(-1) for score in scores])), scores


def gradient_by_rows(gradients: list[Tensor], inputs: Flat, scores: list[Tensor], needed: list[bool]) -> Flat:
    (output, norm), (query, key, value) = gradients, inputs
    assert query is not None
    assert key is not None
    assert value is not None
    to_key, to_value = key, value
    to_query: list[Tensor] = []
    for (here, seen), score in reversed(list(zip(row_blocks(query.shape[2]), scores, strict=True))):
        flat = (norm[..., here, None], output[..., here, :], value[..., seen, :].mT)
        inner = torch.baddbmm(*(part.flatten(0, 1) for part in flat)).view_as(score)  # (X, chunks, rows, seen)
        inner = causal_(inner, here.start)
        to_query.insert(0, inner @ key[..., seen, :])
        keys, values = inner.mT @ query[..., here, :], score.mT @ output[..., here, :]
        if seen.stop == query.shape[2]:  # the last rows come first and see everything
            to_key, to_value = keys, values
        else:
            to_key[..., seen, :] += keys
            to_value[..., seen, :] += values
    return [joined(to_query), to_key, to_value]


def serves_rows(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    return None if query.ndim == 4 and query.shape[2] else "no steps (X, chunks, T, D)"


CAUSAL_PRODUCT.serve(Backend("rows", serves_rows, lambda *parts: product_by_rows(*parts)[0]))
CAUSAL_PRODUCT.train(TrainingBackend("rows", serves_rows, product_by_rows, gradient_by_rows))


def row_blocks(steps: int) -> list[tuple[slice, slice]]:
    """Rows of steps that are computed at a time, and all steps up to their last."""
    rows = -(-steps // -(-steps // CHUNK))
    return [(slice(first, first + rows), slice(0, min(first + rows, steps))) for first in range(0, steps, rows)]


def causal_(scores: Tensor, first: int) -> Tensor:
    """Zeros for steps later than the row's own, in place; rows (..., t, j) begin with step `first`."""
    rows = scores.shape[-2]
    scores[..., first:].mul_(scores.new_ones(rows, rows).tril_())
    return scores


def joined(parts: list[Tensor]) -> Tensor:
    """Rows of steps as one tensor again."""
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


def read_within(query: Tensor, key: Tensor, value: Tensor, gain: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
    """The same for any decay: what steps read from their own chunk and its share of n q."""
    scale, outputs, norms = query.shape[3] ** -0.5, [], []
    for here, seen in row_blocks(query.shape[2]):
        weights = decay_matrix(gain[..., seen], peak[..., here], here.start).mul_(scale)
        scores = (query[..., here, :] @ key[..., seen, :].mT).to(weights.dtype)
        scores = scores * weights if torch.is_grad_enabled() else scores.mul_(weights)
        outputs.append(scores.to(value.dtype) @ value[..., seen, :])
        norms.append(scores.sum(-1))
    return joined(outputs), joined(norms)


def decay_matrix(gain: Tensor, peak: Tensor, first: int = 0) -> Tensor:
    """exp(gain_j - peak_t) for steps t from `first` and every step j up to t, (..., t, j); 0 for later ones."""
    return decay_weight(gain[..., None, :] - peak[..., :, None]).tril(first)


def decay_weight(logarithm: Tensor) -> Tensor:
    """exp of at most 0. Below 1e-26 nothing changes a sum, and processors are slow with numbers that underflow."""
    return logarithm.clamp(LEAST, 0.0).exp()


def written_by_chunks(key: Tensor, value: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """What each chunk alone leaves behind: memory (X, chunks, D, V) and normaliser (X, chunks, D)."""
    weights = weights * key.shape[-1] ** -0.5
    memory = (key * weights[..., None].to(key.dtype)).mT @ value
    return memory.to(weights.dtype), (weights[..., None, :] @ key.to(weights.dtype))[..., 0, :]


def add_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right, (X, chunks, ...); without gradients, in the memory of the total."""
    flat = (total.flatten(0, 1), left.flatten(0, 1), right.flatten(0, 1))
    return (torch.baddbmm(*flat) if torch.is_grad_enabled() else flat[0].baddbmm_(*flat[1:])).view_as(total)


def carry(
    written: tuple[Tensor, Tensor], decay: Tensor, peak: Tensor, start: State | None, *, final_state: bool
) -> tuple[State, State | None]:
    """The states in front of every chunk (X, chunks, ...) and behind all; `decay` and `peak` are those of whole chunks.

    Between chunks it is the parallel form again.
    """
    sums = decay.cumsum(1)
    level = sums.new_full(sums.shape[:1], NEVER) if start is None else start.stabiliser.to(sums.dtype)
    logs = torch.cat([level[:, None], peak - (sums - decay)], 1)  # (X, 1 + chunks)
    highest = running_max(logs.detach())
    weights = decay_matrix(logs, highest).to(written[0].dtype)
    levels = highest + F.pad(sums, (1, 0))
    front = combine(weights[:, :-1], levels[:, :-1], written, start)
    if not final_state:
        return front, None
    return front, State(*(part[:, 0] for part in combine(weights[:, -1:], levels[:, -1:], written, start)))


def combine(weights: Tensor, levels: Tensor, updates: tuple[Tensor, Tensor], start: State | None) -> State:
    """One state per row of weights (X, rows, 1 + chunks) over the start and what the chunks wrote."""
    states = []
    for part, update in enumerate(updates):
        mixed = weights[:, :, 1:] @ update.flatten(2)
        if start is not None:
            mixed = torch.addcmul(mixed, weights[:, :, :1], start[part].flatten(1)[:, None])
        states.append(mixed.unflatten(2, update.shape[2:]))
    return State(states[0], states[1], levels)


def flat_state(state: State, lead: torch.Size) -> State:
    """A state with one leading axis in the place of `lead`, to which it may have to be spread."""
    axes, rows = state.stabiliser.ndim, math.prod(lead)
    return State(*(part.expand(*lead, *part.shape[axes:]).reshape(rows, *part.shape[axes:]) for part in state))


def mlstm_shape(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Without data only shapes and operator counts matter: the products of the chunkwise form as B.2 counts them.

    A step meets half a chunk and itself; the state is charged once per chunk.
    """
    chunks, seen = -(-query.shape[-2] // CHUNK), CHUNK // 2 + 1
    scores = query @ key.new_empty(*key.shape[:-2], key.shape[-1], seen)
    output = scores @ value.new_empty(*value.shape[:-2], seen, value.shape[-1])
    ends = [sequence.new_empty(*sequence.shape[:-2], chunks, sequence.shape[-1]) for sequence in (key, value)]
    ends[0][..., :, None] @ ends[1][..., None, :]
    return output
