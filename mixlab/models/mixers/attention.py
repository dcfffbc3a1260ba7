"""Vanilla self-attention, over the whole grid or in a sliding window (MetaFormer, 2.3 and 3.2.1)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mixlab.core.errors import ConfigError
from mixlab.core.grid import Grid
from mixlab.models.mixers.base import MIXERS, Mixer, StageParts, heads_for
from mixlab.ops.attention import (
    attention,
    attention_weights,
    join_heads,
    offsets_between,
    split_heads,
    window_attention,
    window_mask,
)
from mixlab.ops.layers import through
from mixlab.ops.resample import resample_map


@dataclass(frozen=True)
class AttentionOptions:
    """`bias` is the model's own unless given. `relative_bias`: a learned term per offset of two tokens, from zero.

    The latter is what dense tasks add to a plain transformer (Vision-LSTM, B.5).
    """

    head_dim: int = 32
    bias: bool | None = None
    relative_bias: bool = False

    def __post_init__(self) -> None:
        if self.head_dim < 1:
            raise ConfigError(f"head_dim must be 1 or more; got {self.head_dim}.")


@dataclass(frozen=True)
class WindowAttentionOptions(AttentionOptions):
    """Each token sees `window` x `window` tokens around it; the parameters are those of attention.

    MetaFormer's window for detection was not published: 13 x 13 gives the multiply-accumulates of its Table 9.
    """

    window: int = 13

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 3 or self.window % 2 == 0:
            raise ConfigError(f"An attention window has an odd size of 3 or more; got {self.window}.")
        if self.relative_bias:
            raise ConfigError("window_attention has no relative_bias; attention has.")


class Attention(Mixer):
    outruns_compilers = True
    mixes_class_tokens = True
    explains = ("attention",)
    linears = ("qkv", "project")

    def __init__(
        self, dim: int, heads: int, *, bias: bool, window: int | None = None, relative_bias: Grid | None = None
    ) -> None:
        super().__init__()
        self.heads = heads
        self.window = window
        self.relative_bias = None if relative_bias is None else RelativeBias(relative_bias, heads)
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.project = nn.Linear(dim, dim, bias=bias)

    @property
    def last_layer(self) -> nn.Linear:
        return self.project

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        qkv = through(self.qkv, tokens)  # (B, N, 3 * heads * head_dim)
        if self.window is None:
            offset = None if self.relative_bias is None else self.relative_bias(grid).to(qkv.dtype)
            mixed = attention(qkv, self.heads, offset)
        else:
            mixed = join_heads(window_attention(*split_heads(qkv, self.heads), grid, self.window))
        return through(self.project, mixed)

    def split(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, each (B, heads, N, head_dim)."""
        return split_heads(through(self.qkv, tokens), self.heads)

    def explain(self, tokens: Tensor, grid: Grid) -> dict[str, Tensor]:
        query, key, _ = self.split(tokens)
        mask = None if self.window is None else window_mask(grid, self.window, tokens.device)
        mask = mask if self.relative_bias is None else self.relative_bias(grid)
        return {"attention": attention_weights(query, key, mask)}  # (B, heads, N, N)


class RelativeBias(nn.Module):
    """A learned number per head for every offset between two image tokens, (heads, N, N); resampled for any grid.

    Class tokens have three of their own: from them, to them, and among them.
    """

    undecayed = ("table", "class_tokens")
    optional = ("table", "class_tokens")  # weights that know nothing of it are as good as zeros

    def __init__(self, grid: Grid, heads: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(heads, 2 * grid.height - 1, 2 * grid.width - 1))
        self.class_tokens = nn.Parameter(torch.zeros(heads, 3)) if grid.prefix else None

    def forward(self, grid: Grid) -> Tensor:
        table = resample_offsets(self.table, Grid(2 * grid.height - 1, 2 * grid.width - 1))
        image = offsets_between(table, grid)
        if not grid.prefix:
            return image
        entries = image.new_zeros(len(image), 3) if self.class_tokens is None else self.class_tokens
        outward, inward, among = entries.unbind(1)
        side = outward[:, None, None].expand(-1, grid.prefix, grid.image_tokens)
        top = torch.cat([among[:, None, None].expand(-1, grid.prefix, grid.prefix), side], 2)
        below = torch.cat([inward[:, None, None].expand(-1, grid.image_tokens, grid.prefix), image], 2)
        return torch.cat([top, below], 1)

    def resize(self, name: str, value: Tensor, source: Grid | None) -> Tensor:
        if name != "table" or value.ndim != 3:
            return value
        return resample_offsets(value, Grid(self.table.shape[1], self.table.shape[2]))


def resample_offsets(table: Tensor, target: Grid) -> Tensor:
    same = tuple(table.shape[1:]) == (target.height, target.width)
    return table if same else resample_map(table[None], target)[0]


@MIXERS.register("attention", AttentionOptions)
def build_stage(options: AttentionOptions, dim: int, depth: int, reference_grid: Grid) -> StageParts:
    relative_bias = reference_grid if options.relative_bias else None
    return attention_stage(options, dim, depth, relative_bias=relative_bias)


@MIXERS.register("window_attention", WindowAttentionOptions)
def build_window_stage(options: WindowAttentionOptions, dim: int, depth: int, reference_grid: Grid) -> StageParts:
    return attention_stage(options, dim, depth, window=options.window)


def attention_stage(options: AttentionOptions, dim: int, depth: int, **form: Any) -> StageParts:
    heads = heads_for(dim, options.head_dim)
    return StageParts.of(Attention(dim, heads, bias=bool(options.bias), **form) for _ in range(depth))
