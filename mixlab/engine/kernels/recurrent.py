"""LSTM over the rows and columns of maps, with nothing copied: `mixlab.ops.recurrent` is the reference."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mixlab.engine.kernels import constant, kernels, pointer, structure
from mixlab.engine.product import product

AT_ONCE = 2**20  # numbers of the inputs' share that are computed before the steps use them: 4 MB
BLOCK = constant("LSTM_UNITS")
MOST = 4  # runs of one call: both axes, both ways


class Run(NamedTuple):
    """One layer in one direction: input and hidden weight and their biases, and how it goes over the map."""

    weights: tuple[Tensor, Tensor, Tensor, Tensor]
    vertical: bool
    backwards: bool

    @property
    def units(self) -> int:
        return self.weights[1].shape[1]


OneLstm = structure("lstm")
Lstms = structure("lstms")


@torch.no_grad()
def lstm_maps(image: Tensor, runs: Sequence[Run]) -> Tensor:
    """(B, H, W, C) as the outputs of all runs side by side, (B, H, W, sum of units)."""
    (batch, height, width, _), row = image.shape, sum(run.units for run in runs)
    out = image.new_empty(batch, height, width, row)
    group = max(1, AT_ONCE // (4 * row * height * width))
    packed = [image.new_empty(-(-run.units // BLOCK) * BLOCK * 4 * run.units) for run in runs]
    for index, (some, place) in enumerate(zip(image.split(group), out.split(group), strict=True)):
        run_some(some, place, runs, packed, packs=index == 0)
    return out


def run_some(image: Tensor, out: Tensor, runs: Sequence[Run], packed: Sequence[Tensor], *, packs: bool) -> None:
    found, (batch, height, width, row) = kernels(), out.shape
    assert found is not None
    inputs = [product(image, run.weights[0], run.weights[2]) for run in runs]  # each (b, H, W, 4 * units)
    about = Lstms(count=len(runs), images=batch, packs=packs, threads=torch.get_num_threads())
    start = out.data_ptr()
    for index, run in enumerate(runs):
        pointers = (pointer(one) for one in (inputs[index], run.weights[1], run.weights[3], packed[index]))
        about.each[index] = OneLstm(*pointers, start, row, height, width, run.units, run.vertical, run.backwards)
        start += run.units * out.element_size()
    found.run("lstm", about)
