"""Recurrent mixing: over columns and rows (Sequencer's BiLSTM2D, Eqs. 5-7), or over one long sequence."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from mixlab.core.errors import ConfigError
from mixlab.core.grid import Grid
from mixlab.engine.kernels.recurrent import Run, lstm_maps, lstm_may_run
from mixlab.models.layers import is_plain, through
from mixlab.models.mixers.base import MIXERS, Mixer, StageParts
from mixlab.ops.recurrent import GATES, Cell, Direction, recurrent

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

    def runs(self, *, vertical: bool) -> list[Run]:
        """Its directions as they go over a map."""
        return [Run(weights, vertical, backwards=bool(index)) for index, weights in enumerate(self.directions())]

    def may_run(self, image: Tensor) -> bool:
        """Whether the kernel may compute this layer over a map (B, H, W, C)."""
        return self.cell == "lstm" and is_plain(self) and lstm_may_run(image, self.runs(vertical=True))


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
        row = grid.image(tokens)
        if self.layer.may_run(row[:, None]):
            mixed = lstm_maps(row[:, None], self.layer.runs(vertical=False))[:, 0]
        else:
            mixed = self.layer(row)
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
        self.merge = merge
        self.fusion = fusion

    @property
    def last_layer(self) -> nn.Linear | None:
        return self.fusion

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        image = grid.pixels(tokens)  # (B, H, W, C)
        mixed = self.both(image) if self.may_run(image) else self.one_by_one(image, grid)
        mixed = mixed.flatten(1, 2)  # (B, H*W, width)
        return grid.behind_zeros(mixed if self.fusion is None else through(self.fusion, mixed))

    def may_run(self, image: Tensor) -> bool:
        layers = [layer for layer in (self.vertical, self.horizontal) if layer is not None]
        return all(layer.may_run(image) for layer in layers)

    def both(self, image: Tensor) -> Tensor:
        """All directions of both axes at once, by the kernel."""
        columns = [] if self.vertical is None else self.vertical.runs(vertical=True)
        rows = [] if self.horizontal is None else self.horizontal.runs(vertical=False)
        outputs = lstm_maps(image, [*columns, *rows])
        if self.merge == "concatenate" or not (columns and rows):
            return outputs
        one, other = outputs.chunk(2, -1)
        return one + other

    def one_by_one(self, image: Tensor, grid: Grid) -> Tensor:
        outputs = []
        if self.vertical is not None:
            columns = self.vertical(image.transpose(1, 2).flatten(0, 1))  # (B * W, H, width)
            outputs.append(columns.unflatten(0, (image.shape[0], grid.width)).transpose(1, 2))
        if self.horizontal is not None:
            rows = self.horizontal(image.flatten(0, 1))  # (B * H, W, width)
            outputs.append(rows.unflatten(0, (image.shape[0], grid.height)))
        return torch.cat(outputs, -1) if self.merge == "concatenate" else torch.stack(outputs).sum(0)


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
