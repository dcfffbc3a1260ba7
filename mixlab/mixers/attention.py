"""Vanilla self-attention, over the whole grid or in a sliding window (MetaFormer, 2.3 and 3.2.1)."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from mixlab.errors import ConfigError
from mixlab.grid import Grid
from mixlab.mixers.base import MIXERS, Mixer, StageParts, heads_for
from mixlab.ops.attention import attention_weights, window_attention, window_mask


@dataclass(frozen=True)
class AttentionOptions:
    """`bias` is the model's own unless given."""

    head_dim: int = 32
    bias: bool | None = None

    def __post_init__(self) -> None:
        if self.head_dim < 1:
            raise ConfigError(f"head_dim must be 1 or more; got {self.head_dim}.")


@dataclass(frozen=True)
class WindowAttentionOptions(AttentionOptions):
    """Each token sees `window` x `window` tokens around it; the parameters are those of attention."""

    window: int = 15

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 3 or self.window % 2 == 0:
            raise ConfigError(f"An attention window has an odd size of 3 or more; got {self.window}.")


class Attention(Mixer):
    mixes_class_tokens = True
    explains = ("attention",)

    def __init__(self, dim: int, heads: int, *, bias: bool, window: int | None) -> None:
        super().__init__()
        self.heads = heads
        self.window = window
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.project = nn.Linear(dim, dim, bias=bias)

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        query, key, value = self.split(tokens)
        if self.window is None:
            mixed = F.scaled_dot_product_attention(query, key, value)
        else:
            mixed = window_attention(query, key, value, grid, self.window)
        return self.project(mixed.transpose(1, 2).flatten(2))

    def split(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.qkv(tokens).unflatten(2, (3, self.heads, -1))  # (B, N, 3, heads, head_dim)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, heads, N, head_dim)
        return query, key, value

    def explain(self, tokens: Tensor, grid: Grid) -> dict[str, Tensor]:
        query, key, _ = self.split(tokens)
        mask = None if self.window is None else window_mask(grid, self.window, tokens.device)
        return {"attention": attention_weights(query, key, mask)}  # (B, heads, N, N)


@MIXERS.register("attention", AttentionOptions)
def build_stage(options: AttentionOptions, dim: int, depth: int, reference_grid: Grid) -> StageParts:
    return attention_stage(options, dim, depth, window=None)


@MIXERS.register("window_attention", WindowAttentionOptions)
def build_window_stage(options: WindowAttentionOptions, dim: int, depth: int, reference_grid: Grid) -> StageParts:
    return attention_stage(options, dim, depth, window=options.window)


def attention_stage(options: AttentionOptions, dim: int, depth: int, *, window: int | None) -> StageParts:
    heads = heads_for(dim, options.head_dim)
    return StageParts.of(Attention(dim, heads, bias=bool(options.bias), window=window) for _ in range(depth))
