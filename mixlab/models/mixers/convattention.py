"""Conv-attention: factorised attention with convolutional position encodings (CoaT, sections 4.1-4.3)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mixlab.core.errors import ConfigError
from mixlab.core.grid import Grid
from mixlab.models.layers import DepthwiseConv
from mixlab.models.mixers.base import MIXERS, BlockParts, Mixer, Shared, StageParts
from mixlab.models.modules import Modules
from mixlab.ops.convattention import add_seen, factorised_attention
from mixlab.ops.layers import positioned, through, through_attention


@dataclass(frozen=True)
class ConvAttentionOptions:
    """`heads` is lowered to a count that divides the channels. `bias` is the model's own unless given.

    `windows` of the relative encoding go to the heads in the proportions of `window_heads`. `scaled` and
    `softmax_query` are the factorisation variants of section 4.1.
    """

    heads: int = 8
    position: bool = True
    relative_position: bool = True
    windows: tuple[int, ...] = (3, 5, 7)
    window_heads: tuple[int, ...] = (2, 3, 3)
    scaled: bool = True
    softmax_query: bool = False
    bias: bool | None = None

    def __post_init__(self) -> None:
        if self.heads < 1:
            raise ConfigError(f"heads must be 1 or more; got {self.heads}.")
        if len(self.windows) != len(self.window_heads) or min(self.window_heads, default=0) < 1:
            raise ConfigError(
                f"windows and window_heads need one entry each per window, heads of 1 or more; "
                f"got {list(self.windows)} and {list(self.window_heads)}."
            )
        if any(window < 1 or window % 2 == 0 for window in self.windows):
            raise ConfigError(f"windows must be odd and 1 or more; got {list(self.windows)}.")


class ConvPosition(nn.Module):
    """Image tokens plus a depthwise convolution over them; class tokens pass (Conv-Pos)."""

    def __init__(self, dim: int, *, bias: bool, kernel: int = 3) -> None:
        super().__init__()
        self.conv = DepthwiseConv(dim, kernel, bias=bias)

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        return positioned(self.conv, tokens, grid)


class ConvRelativePosition(nn.Module):
    """Query times depthwise convolution of the value, with a window per group of heads (Conv-Rel-Pos, Eq. 10)."""

    def __init__(self, widths: list[int], windows: list[int], *, bias: bool) -> None:
        super().__init__()
        self.widths = widths
        self.convs: Modules[DepthwiseConv] = Modules(
            DepthwiseConv(width, window, bias=bias) for width, window in zip(widths, windows, strict=True)
        )

    def forward(self, value: Tensor, grid: Grid) -> Tensor:
        """What the windows see of the values, (B, H*W, C)."""
        parts = grid.to_map(value).split(self.widths, 1)
        return grid.from_map(torch.cat([conv(part) for conv, part in zip(self.convs, parts, strict=True)], 1))


class ConvAttention(Mixer):
    """Linear in the number of tokens. The encodings belong to the stage; blocks of a stage share them."""

    outruns_compilers = True
    mixes_class_tokens = True
    crosses = True
    explains = ("query_factor", "key_factor")
    linears = ("qkv", "project")
    calls = ("relative",)

    def __init__(self, dim: int, heads: int, options: ConvAttentionOptions, relative: Shared | None) -> None:
        super().__init__()
        self.heads = heads
        self.scaled = options.scaled
        self.softmax_query = options.softmax_query
        self.relative = relative
        self.qkv = nn.Linear(dim, 3 * dim, bias=bool(options.bias))
        self.project = nn.Linear(dim, dim, bias=bool(options.bias))

    @property
    def last_layer(self) -> nn.Linear:
        return self.project

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        qkv = through(self.qkv, tokens)  # (B, N, 3 C)
        encoding = None if self.relative is None else self.relative.module
        form = {"scaled": self.scaled, "softmax_query": self.softmax_query}
        return through(self.project, through_attention(qkv, encoding, self.heads, grid, **form))

    def split(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, each (B, N, C)."""
        query, key, value = through(self.qkv, tokens).chunk(3, -1)
        return query, key, value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, grid: Grid) -> Tensor:
        """Eq. 12; key and value may come from another scale, on this grid."""
        form = {"scaled": self.scaled, "softmax_query": self.softmax_query}
        mixed = factorised_attention(query, key, value, self.heads, **form)
        if self.relative is not None:
            mixed = add_seen(mixed, query, self.relative(value, grid), grid)
        return through(self.project, mixed)

    def explain(self, tokens: Tensor, grid: Grid) -> dict[str, Tensor]:
        """The factors of the attention, each (B, heads, N, head_dim): the map of a query is its row times every key.

        The product stands for what softmax gives elsewhere (section 7), but entries may be negative and rows add up to
        any number. The encoding of relative positions is not in it.
        """
        query, key, _ = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.split(tokens))
        query = query.softmax(-1) if self.softmax_query else query
        query = query * query.shape[-1] ** -0.5 if self.scaled else query
        return {"query_factor": query, "key_factor": key.softmax(2)}


def heads_up_to(dim: int, heads: int) -> int:
    """The largest count up to `heads` that divides the channels."""
    return next(count for count in range(min(heads, dim), 0, -1) if dim % count == 0)


def split_heads(heads: int, shares: tuple[int, ...]) -> list[int]:
    """Heads per window in the given proportions; the last window takes what rounding leaves."""
    bounds = [round(heads * sum(shares[: index + 1]) / sum(shares)) for index in range(len(shares))]
    return [bound - before for bound, before in zip(bounds, [0, *bounds], strict=False)]


@MIXERS.register("convattention", ConvAttentionOptions)
def build_stage(options: ConvAttentionOptions, dim: int, depth: int, reference_grid: Grid) -> StageParts:
    heads = heads_up_to(dim, options.heads)
    shared = nn.ModuleDict()
    if options.position:
        shared["position"] = ConvPosition(dim, bias=bool(options.bias))
    if options.relative_position:
        counts = split_heads(heads, options.window_heads)
        kept = [(count * dim // heads, window) for count, window in zip(counts, options.windows, strict=True) if count]
        widths, windows = [width for width, _ in kept], [window for _, window in kept]
        shared["relative_position"] = ConvRelativePosition(widths, windows, bias=bool(options.bias))
    position = Shared(shared["position"]) if options.position else None
    relative = Shared(shared["relative_position"]) if options.relative_position else None
    blocks = [BlockParts([ConvAttention(dim, heads, options, relative)], position) for _ in range(depth)]
    return StageParts(blocks, shared if len(shared) else None)
