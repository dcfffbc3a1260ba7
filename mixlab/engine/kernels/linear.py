"""Linear layers with what follows them in one pass; `mixlab.ops.linear` has the reference."""

import ctypes
import math

import torch
from torch import Tensor

from mixlab.engine.kernels import activation_number, constant, kernels, pointer, structure

PANEL = constant("PACKED_COLUMNS")
FEW = 480  # rows up to which a panel of the weight is packed where it is used
AFTER = ("none", "gelu", "relu", "squared_relu", "silu")
BESIDE = ("onto", "times_root", "and_gelu", "gelu_slope", "and_relu")  # what has other inputs or outputs
KINDS = (*AFTER, *BESIDE)
Then = tuple[float, float]  # a factor and a summand behind the squared ReLU
AS_IT_IS: Then = (1.0, 0.0)

LinearAbout = structure("linear")
MlpAbout = structure("mlp")
StarAbout = structure("star")
WeightAbout = structure("weight")


def run_weight(left: Tensor, right: Tensor, out: Tensor, sums: Tensor | None, *, adds: bool) -> None:
    """left^T right into `out`, or added to it, and so the sums of left's rows into `sums`; both sides are (N, C) with
    contiguous rows.
    """
    found = kernels()
    assert found is not None
    sizes = (left.shape[1], right.shape[1], adds, torch.get_num_threads())
    pointers = (pointer(one) for one in (left, right, out, sums))
    found.run("weight", WeightAbout(*pointers, left.stride(0), right.stride(0), len(left), *sizes))


STAR_AT_ONCE = constant("STAR_AT_ONCE")


def run_star(gradient: Tensor, kept: Tensor, slope: float) -> tuple[Tensor, Tensor, Tensor]:
    """gradient * kept * slope, and the sums of gradient * kept^2 and of gradient; both are contiguous."""
    found, count = kernels(), gradient.numel()
    assert found is not None
    tasks, out = -(-count // STAR_AT_ONCE), torch.empty_like(gradient)
    sums = gradient.new_empty(tasks, 2, dtype=torch.float64)
    pointers = (pointer(one) for one in (gradient, kept, out, sums))
    found.run("star", StarAbout(*pointers, count, tasks, slope, torch.get_num_threads()))
    squares, plain = sums.sum(0).to(gradient.dtype)
    return out, squares, plain


def fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether rows of x and rows or columns of the weight (out, in) can be walked."""
    return x.is_contiguous() and 1 in weight.stride() and (bias is None or bias.is_contiguous())


def run_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    after: str = "none",
    then: Then = AS_IT_IS,
    *,
    out: Tensor | None = None,
    beside: Tensor | None = None,
    aside: Tensor | None = None,
) -> Tensor:
    """f(x W^T + b) of (..., in) and (out, in), or one of `BESIDE`; all outputs and what lies beside are contiguous."""
    found, rows = kernels(), math.prod(x.shape[:-1])
    assert found is not None
    if out is None:
        out = x.new_empty(*x.shape[:-1], len(weight))
    packed = room_for(weight) if rows > FEW else None
    about = describe(x, weight, bias, packed, out, rows, after, then)
    about.beside, about.aside = pointer(beside), pointer(aside)
    found.run("linear", about)
    return out


def run_mlp(
    x: Tensor,
    first: Tensor,
    bias: Tensor | None,
    second: Tensor,
    offset: Tensor | None,
    after: str,
    then: Then = AS_IT_IS,
    *,
    out: Tensor | None = None,
    hidden: Tensor | None = None,
    beside: Tensor | None = None,
    aside: Tensor | None = None,
) -> Tensor:
    """f(x A^T + a) B^T + b of (..., in) with weights (hidden, in) and (out, hidden).

    `hidden` gets f(x A^T + a), or of "and_gelu" what is in front of it. The rest is as in `run_linear`.
    """
    found, rows = kernels(), math.prod(x.shape[:-1])
    assert found is not None
    assert hidden is not None or after not in BESIDE
    if out is None:
        out = x.new_empty(*x.shape[:-1], len(second))
    if rows <= FEW:
        between = hidden if hidden is not None else x.new_empty(rows, len(first))
        taken = x.new_empty(rows, len(first)) if after == "and_gelu" else between
        run_linear(
            x, first, bias, after, then, out=between, beside=beside, aside=taken if taken is not between else aside
        )
        return run_linear(taken, second, offset, out=out)
    packed = [room_for(weight) for weight in (first, second)]
    about = MlpAbout(
        describe(x, first, bias, packed[0], hidden, rows, after, then),
        describe(None, second, offset, packed[1], out, rows),
        0,
    )
    about.first.beside, about.first.aside = pointer(beside), pointer(aside)
    found.run("mlp", about)
    return out


def room_for(weight: Tensor) -> Tensor:
    """What a weight (out, in) is packed into."""
    return weight.new_empty(-(-len(weight) // PANEL) * PANEL * weight.shape[1])


def describe(
    left: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    packed: Tensor | None,
    out: Tensor | None,
    rows: int,
    after: str = "none",
    then: Then = AS_IT_IS,
) -> ctypes.Structure:
    """Of contiguous rows and a weight (out, in) with contiguous rows or columns."""
    (columns, depth), turned = weight.shape, weight.stride(1) == 1
    strides = (depth, 1, weight.stride(0) if turned else weight.stride(1), columns)
    numbers = (rows, 1, columns, depth, turned, activation_number(after), torch.get_num_threads(), 0, then)
    return LinearAbout(*map(pointer, (left, weight, bias, packed, out)), *[None] * 6, *strides, *numbers)
