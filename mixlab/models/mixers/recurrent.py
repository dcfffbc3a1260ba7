"""Recurrent mixing: over columns and rows (Sequencer's BiLSTM2D, Eqs. 5-7), or over one long sequence."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from mixlab.core.errors import ConfigError
from mixlab.core.grid import Grid
from mixlab.models.mixers.base import MIXERS, Mixer, StageParts
from mixlab.ops.layers import through
from mixlab.ops.recurrent import GATES, Cell, Direction, Walk, recurrent, recurrent_maps

Axis = Literal["vertical", "horizontal"]


@dataclass(frozen=True)
class RecurrentOptions:
    """`hidden_ratio`: the cell's width D as a share of the channels. `fusion`: a linear layer behind the cells.

    `bias` of that layer is the model's own unless given; the cells always have theirs.
    """

    cell: Cell = "lstm"
    bidirectional: bool = True
    hidden_ratio: float = 0.5
    fusion: bool = False
    bias: bool | None = None

    def __post_init__(self) -> None:
        if self.hidden_ratio <= 0:
            raise ConfigError(f"hidden_ratio must be above 0; got {self.hidden_ratio}.")


@dataclass(frozen=True)
class Recurrent2dOptions(RecurrentOptions):
    """`merge`: how the outputs over columns and over rows come together."""

    hidden_ratio: float = 0.25
    fusion: bool = True
    axes: Literal["both", "vertical", "horizontal"] = "both"
    merge: Literal["concatenate", "add"] = "concatenate"


class RecurrentLayer(nn.Module):
    """One recurrent layer in one or both directions over sequences (N, T, C), with PyTorch's names and start values."""

    initializes_itself = True

    def __init__(self, dim: int, hidden: int, cell: Cell, *, bidirectional: bool) -> None:
        super().__init__()
        self.cell: Cell = cell
        self.suffixes = ("", "_reverse") if bidirectional else ("",)
        self.width = hidden * len(self.suffixes)
        rows, bound = GATES[cell] * hidden, hidden**-0.5
        for suffix in self.suffixes:
            for name, shape in (("weight_ih", (rows, dim)), ("weight_hh", (rows, hidden))):
                self.register_parameter(name + suffix, nn.Parameter(torch.empty(shape)))
            for name in ("bias_ih", "bias_hh"):
                self.register_parameter(name + suffix, nn.Parameter(torch.empty(rows)))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def directions(self) -> list[Direction]:
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        return [tuple(getattr(self, name + suffix) for name in names) for suffix in self.suffixes]

    def forward(self, sequences: Tensor) -> Tensor:
        return recurrent(self.cell, sequences, self.directions())  # (N, T, width)

    def walks(self, *, vertical: bool) -> list[Walk]:
        """Its directions as they go over the columns or the rows of a map."""
        return [Walk(weights, vertical, bool(index)) for index, weights in enumerate(self.directions())]


class Recurrent1d(Mixer):
    """The tokens as one sequence, row by row: the vanilla Sequencer block."""

    outruns_compilers = True
    trains_compiled = False  # a compiler unrolls the steps
    linears = ("fusion",)

    def __init__(self, layer: RecurrentLayer, fusion: nn.Linear | None) -> None:
        super().__init__()
        self.layer = layer
        self.fusion = fusion

    @property
    def last_layer(self) -> nn.Linear | None:
        return self.fusion

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        row = grid.image(tokens)[:, None]  # (B, 1, H*W, C)
        mixed = recurrent_maps(self.layer.cell, row, self.layer.walks(vertical=False))[:, 0]
        return grid.behind_zeros(mixed if self.fusion is None else through(self.fusion, mixed))


class Recurrent2d(Mixer):
    """Columns and rows as sequences of their own, then merged and fused."""

    outruns_compilers = True
    trains_compiled = False
    linears = ("fusion",)

    def __init__(
        self, vertical: RecurrentLayer | None, horizontal: RecurrentLayer | None, merge: str, fusion: nn.Linear | None
    ) -> None:
        super().__init__()
        self.vertical = vertical
        self.horizontal = horizontal
        self.cell = next(layer.cell for layer in (vertical, horizontal) if layer is not None)
        self.merge = merge
        self.fusion = fusion

    @property
    def last_layer(self) -> nn.Linear | None:
        return self.fusion

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        columns = [] if self.vertical is None else self.vertical.walks(vertical=True)
        rows = [] if self.horizontal is None else self.horizontal.walks(vertical=False)
        mixed = recurrent_maps(self.cell, grid.pixels(tokens), [*columns, *rows]).flatten(1, 2)  # (B, H*W, width)
        if self.merge == "add" and columns and rows:
            mixed = torch.add(*mixed.chunk(2, -1))
        return grid.behind_zeros(mixed if self.fusion is None else through(self.fusion, mixed))


def fusion_layer(width: int, dim: int, options: RecurrentOptions) -> nn.Linear | None:
    """The layer that brings `width` back to the model's; without it the two must be equal."""
    if not options.fusion and width != dim:
        raise ConfigError(
            f"Without fusion a recurrent mixer must give as many channels as it takes; it gives {width} for {dim}. "
            f"Set fusion = true, or choose hidden_ratio, axes and merge so that the widths agree."
        )
    return nn.Linear(width, dim, bias=bool(options.bias)) if options.fusion else None


def hidden_width(options: RecurrentOptions, dim: int) -> int:
    return max(1, int(options.hidden_ratio * dim))


@MIXERS.register("rnn1d", RecurrentOptions)
def build_stage(options: RecurrentOptions, dim: int, depth: int, reference_grid: Grid) -> StageParts:
    def mixer() -> Recurrent1d:
        layer = RecurrentLayer(dim, hidden_width(options, dim), options.cell, bidirectional=options.bidirectional)
        return Recurrent1d(layer, fusion_layer(layer.width, dim, options))

    return StageParts.of(mixer() for _ in range(depth))


@MIXERS.register("rnn2d", Recurrent2dOptions)
def build_stage_2d(options: Recurrent2dOptions, dim: int, depth: int, reference_grid: Grid) -> StageParts:
    def layer(axis: Axis) -> RecurrentLayer | None:
        if options.axes not in ("both", axis):
            return None
        return RecurrentLayer(dim, hidden_width(options, dim), options.cell, bidirectional=options.bidirectional)

    def mixer() -> Recurrent2d:
        layers = [layer("vertical"), layer("horizontal")]
        widths = [one.width for one in layers if one is not None]
        width = sum(widths) if options.merge == "concatenate" else widths[0]
        return Recurrent2d(layers[0], layers[1], options.merge, fusion_layer(width, dim, options))

    return StageParts.of(mixer() for _ in range(depth))
