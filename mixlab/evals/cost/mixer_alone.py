"""A token mixer outside of any model: built for a grid, counted without data, and asked how much memory it may take."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from mixlab.core.choices import Choice
from mixlab.core.errors import ConfigError, require
from mixlab.core.grid import Grid
from mixlab.evals.cost.shadow_memory import PeakCounter
from mixlab.metrics.macs import FOURIER, MacCounter
from mixlab.models.config import INHERITED
from mixlab.models.layers import ACTIVATIONS
from mixlab.models.mixers import MIXERS

Entry = str | Mapping[str, Any]
WIDEST = 2  # a grid is at most so many times as wide as high


class Alone(nn.Module):
    """The mixers of one block, with what their stage shares; the position step in front of the block is not theirs."""

    def __init__(self, choice: Choice, dim: int, grid: Grid) -> None:
        super().__init__()
        parts = MIXERS.builder(choice)(choice.options, dim, 1, grid)
        self.shared = parts.shared
        self.mixers = nn.ModuleList(parts.blocks[0].branches)
        self.grid = grid

    def forward(self, tokens: Tensor) -> Tensor:
        first, *others = self.mixers
        mixed: Tensor = first(tokens, self.grid)
        for mixer in others:
            mixed = mixed + mixer(tokens, self.grid)
        return mixed


def parse_mixer(entry: Entry) -> Choice:
    """A name, or a mapping with a name and options. What a model would fill in is GELU and no biases."""
    choice = MIXERS.parse(entry)
    usual = {"activation": ACTIVATIONS.parse("gelu"), "bias": False}
    empty = [field.name for field in fields(choice.options) if field.name in INHERITED]
    filled = {key: usual[key] for key in empty if getattr(choice.options, key) is None}
    return replace(choice, options=replace(choice.options, **filled))


def label_of(entry: Entry) -> str:
    if isinstance(entry, str):
        return entry
    options = [f"{key}={value}" for key, value in entry.items() if key != "name"]
    return " ".join([str(entry["name"]), *options])


def grid_of(length: int) -> Grid:
    """The squarest grid of so many tokens."""
    require(length >= 1, f"lengths of 1 token or more; got {length}.")
    height = next(side for side in range(int(length**0.5), 0, -1) if length % side == 0)
    if length // height > WIDEST * height:
        near = round(length**0.5) ** 2
        raise ConfigError(f"{length} tokens make no grid with sides in a ratio up to {WIDEST}. Take {near}.")
    return Grid(height, length // height)


def on_meta(entry: Entry, length: int, dim: int, batch: int = 1) -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        module = Alone(parse_mixer(entry), dim, grid_of(length)).eval()
        return module, torch.empty(batch, length, dim)


class FourierCounter(MacCounter):
    """Counts the Fourier transforms apart."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.part = "fourier" if func.overloadpacket in FOURIER else "rest"
        return super().__torch_dispatch__(func, types, args, kwargs)


def count_mixer(entry: Entry, length: int, dim: int) -> tuple[int, int]:
    """Multiply-accumulates for one image without computing anything: of all, and of the Fourier transforms in it."""
    module, tokens = on_meta(entry, length, dim)
    counter = FourierCounter()
    with counter, torch.no_grad():
        module(tokens)
    return sum(counter.counts.values()), counter.counts.get("fourier", 0)


def estimate_bytes(entry: Entry, length: int, dim: int, batch: int) -> int:
    """The most that weights and activations may take at once: in float32, and as if no operator were fused."""
    module, tokens = on_meta(entry, length, dim, batch)
    with PeakCounter() as counter, torch.no_grad():
        module(tokens)
    return counter.peak + tokens.nbytes + sum(tensor.nbytes for tensor in module.state_dict().values())
