"""Conv-attention: factorised attention with convolutional position encodings (CoaT, sections 4.1-4.3)."""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixlab.core.errors import ConfigError
from mixlab.core.grid import Grid
from mixlab.core.guards import autocast_dtype, may_overwrite
from mixlab.engine.kernels import may_run
from mixlab.engine.kernels.factor import fits, run_factor
from mixlab.models.layers import DepthwiseConv, is_plain, through, weights_of
from mixlab.models.mixers.base import MIXERS, BlockParts, Mixer, Shared, StageParts
from mixlab.models.modules import Modules
from mixlab.ops.convattention import (
    depthwise_in_one,
    factorised_attention,
    may_run_windows,
    may_train_attention,
    may_train_position,
    placed,
    see,
    trained_attention,
    trained_position,
    with_itself,
)


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
        if is_trained() and type(self.conv) is DepthwiseConv and is_plain(self.conv):
            weight, bias = weights_of(self.conv)
            if may_train_position(tokens, weight, bias, grid):
                return trained_position(tokens, weight, bias, grid)
        if self.runs_natively(tokens, grid):
            return placed(tokens, *weights_of(self.conv), grid)
        if may_merge(tokens, self.conv):
            weight, middle = with_itself(self.conv.weight), self.conv.kernel_size[0] // 2
            seen = F.conv2d(grid.to_map(tokens), weight, self.conv.bias, padding=middle, groups=len(weight))
            image = grid.from_map(seen)
        else:
            image = grid.image(tokens) + grid.from_map(self.conv(grid.to_map(tokens)))
        return torch.cat([tokens[:, : grid.prefix], image], 1) if grid.prefix else image

    def runs_natively(self, tokens: Tensor, grid: Grid) -> bool:
        """Whether a kernel writes the sum where it belongs."""
        if not may_merge(tokens, self.conv):
            return False
        weight, bias = weights_of(self.conv)
        return may_run_windows(tokens, grid, [weight], [bias], tokens.shape[-1])


def is_trained() -> bool:
    """Whether gradients may be wanted, by autograd alone."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def may_merge(tokens: Tensor, *convs: nn.Module) -> bool:
    """Whether convolutions may be computed as another one, which then rounds as finely as they do.

    On a GPU it need not: there float32 convolutions may be done with fewer digits.
    """
    plain = may_overwrite() and tokens.device.type == "cpu" and autocast_dtype(tokens) is None
    fine = tokens.dtype in (torch.float32, torch.float64)
    return plain and fine and all(type(conv) is DepthwiseConv and is_plain(conv) for conv in convs)


class ConvRelativePosition(nn.Module):
    """Query times depthwise convolution of the value, with a window per group of heads (Conv-Rel-Pos, Eq. 10)."""

    def __init__(self, widths: list[int], windows: list[int], *, bias: bool) -> None:
        super().__init__()
        self.widths = widths
        self.convs: Modules[DepthwiseConv] = Modules(
            DepthwiseConv(width, window, bias=bias) for width, window in zip(widths, windows, strict=True)
        )

    def forward(self, mixed: Tensor, query: Tensor, value: Tensor, grid: Grid) -> Tensor:
        """Adds itself to what attention has mixed, in place."""
        grid.image(mixed).addcmul_(grid.image(query), self.near(value, grid))
        return mixed

    def near(self, value: Tensor, grid: Grid) -> Tensor:
        """What the windows see of the values, (B, H*W, C)."""
        image, convs = grid.to_map(value), list(self.convs)
        if may_merge(value, *convs):
            weights, biases = zip(*map(weights_of, convs), strict=True)
            if may_run_windows(value, grid, weights, biases, value.shape[2]):
                seen = value.new_empty(len(value), grid.image_tokens, value.shape[2])
                see(grid.pixels(value), grid._replace(prefix=0).pixels(seen), weights, biases)
                return seen
            near = depthwise_in_one(image, [conv.weight for conv in convs], [conv.bias for conv in convs])
        else:
            parts = image.split(self.widths, 1)
            near = torch.cat([conv(part) for conv, part in zip(convs, parts, strict=True)], 1)
        return grid.from_map(near)


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
        qkv = through(self.qkv, tokens)
        windows = self.windows() if is_trained() and not self.softmax_query else None
        if windows is not None and may_train_attention(qkv, *windows, self.heads, grid):
            return through(self.project, trained_attention(qkv, *windows, self.heads, grid, scaled=self.scaled))
        query, key, value = qkv.chunk(3, -1)
        return self.attend(query, key, value, grid)

    def split(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, each (B, N, C)."""
        query, key, value = through(self.qkv, tokens).chunk(3, -1)
        return query, key, value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, grid: Grid) -> Tensor:
        """Eq. 12; key and value may come from another scale, on this grid."""
        if self.runs_natively(query, key, value):
            relative = None if self.relative is None else cast(ConvRelativePosition, self.relative.module)
            near = None if relative is None else relative.near(value, grid).contiguous()
            scale = (query.shape[2] // self.heads) ** -0.5 if self.scaled else 1.0
            mixed = run_factor(query, key, value, self.heads, scale=scale, near=near, prefix=grid.prefix)
            return through(self.project, mixed)
        settings = {"scaled": self.scaled, "softmax_query": self.softmax_query}
        mixed = factorised_attention(query, key, value, self.heads, **settings)
        if self.relative is not None:
            mixed = self.relative(mixed, query, value, grid)
        return through(self.project, mixed)

    def runs_natively(self, *parts: Tensor) -> bool:
        """Whether attention and the sum with the encoding are one kernel: nobody looks at the latter's call."""
        if self.softmax_query or not may_overwrite() or not may_run(*parts) or not fits(*parts):
            return False
        if self.relative is None:
            return True
        module = getattr(self.relative, "module", None)
        return type(module) is ConvRelativePosition and is_plain(module)

    def windows(self) -> tuple[list[Tensor], list[Tensor | None]] | None:
        """Weights and biases of the encoding, if nobody looks at the calls of its parts."""
        if self.relative is None:
            return [], []
        module = getattr(self.relative, "module", None)
        if type(module) is not ConvRelativePosition or not is_plain(module):
            return None
        convs = list(module.convs)
        if not all(type(conv) is DepthwiseConv and is_plain(conv) for conv in convs):
            return None
        both = [weights_of(conv) for conv in convs]
        return [weight for weight, _ in both], [bias for _, bias in both]

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
