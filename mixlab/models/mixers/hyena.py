"""Hyena: a product of two projections, a global convolution, a product with the next one (HyenaPixel, Eqs. 1 and 4).

`hyena` looks back along the tokens, `hyena_bidirectional` (H_b) both ways, `hyena_pixel` (H_px) over the plane.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixlab.core.errors import require
from mixlab.core.grid import Grid
from mixlab.core.hooks import derived
from mixlab.models.fixed_filter import FixedConv
from mixlab.models.implicit_filter import (
    DECAY,
    ImplicitFilter,
    distance_1d,
    distance_2d,
    features_1d,
    features_2d,
    full,
    taps_around,
    taps_behind,
    taps_both_ways,
)
from mixlab.models.layers import DepthwiseConv
from mixlab.models.mixers.base import MIXERS, Mixer, StageParts
from mixlab.models.modules import Modules
from mixlab.ops.layers import normed, through
from mixlab.ops.longconv import Form, long_conv

NORM_EPS = 1e-5


@dataclass(frozen=True)
class HyenaOptions:
    """`bands`: frequencies of the position features; `hidden` and `layers`: width (4 * bands unless given) and inner
    layers of the network that makes the filter; `short`: taps of the convolution behind the projections; `norm`: layer
    norms behind the first and the last product; `order`: O of Eq. 1, which takes O + 1 projections and O - 1 global
    convolutions. `form` and `reuse` say how it is computed, not what: `form` forces one
    form of the long convolution, `reuse` keeps filters in eval mode until something changes.
    """

    bands: int = 16
    hidden: int | None = None
    layers: int = 2
    short: int = 3
    norm: bool = False
    order: int = 2
    form: Form | None = field(default=None, compare=False)
    reuse: bool = field(default=True, compare=False)

    def __post_init__(self) -> None:
        require(self.order >= 2, f"an order of 2 or more; got {self.order}.")
        require(self.bands >= 1, f"bands of 1 or more; got {self.bands}.")
        require(self.hidden is None or self.hidden >= 1, f"a hidden width of 1 or more; got {self.hidden}.")
        require(self.layers >= 0, f"layers of 0 or more; got {self.layers}.")
        require(self.short >= 1 and self.short % 2 == 1, f"an odd short kernel; got {self.short}.")


@dataclass(frozen=True)
class HyenaPixelOptions:
    """As for Hyena, and `kernel`: a side or (height, width), by default so large that every place sees every other at
    the model's own image size. `filter`: "separable" has explicit k x 1 and 1 x k kernels. `features` of the positions:
    of both axes, or of the taps row by row. `larger` grids: zeros around ("pad"), or a kernel that grows until every
    place sees every other ("resample").
    """

    kernel: int | tuple[int, ...] | None = None
    bands: int = 16
    hidden: int | None = None
    layers: int = 1
    short: int = 5
    norm: bool = True
    filter: Literal["implicit", "separable"] = "implicit"
    features: Literal["1d", "2d"] = "2d"
    larger: Literal["pad", "resample"] = "pad"
    order: int = 2
    form: Form | None = field(default=None, compare=False)
    reuse: bool = field(default=True, compare=False)

    def __post_init__(self) -> None:
        HyenaOptions(self.bands, self.hidden, self.layers, self.short, order=self.order)
        sides = self.kernel if isinstance(self.kernel, tuple) else (self.kernel or 1,) * 2
        odd = len(sides) == 2 and all(side >= 1 and side % 2 == 1 for side in sides)
        require(odd, f"a kernel of one or two odd sides; got {self.kernel}.")
        require(self.features == "1d" or self.bands % 2 == 0, f"even bands, half per axis; got {self.bands}.")
        fixed = self.filter == "separable" and self.larger == "resample"
        require(not fixed, "larger = 'pad' for separable kernels: they have no position features to resample.")


# -- the long convolution ------------------------------------------------------------------------


class LongConv(nn.Module):
    """A convolution with implicit kernels plus a factor per channel, over (B, N, C)."""

    undecayed = ("bias",)

    def __init__(self, filter: ImplicitFilter, dim: int, *, form: Form | None, reuse: bool) -> None:
        super().__init__()
        self.filter = filter
        self.bias = nn.Parameter(torch.randn(dim))
        self.form, self.reuse = form, reuse

    def forward(self, tokens: Tensor, grid: Grid, factor: Tensor | None = None) -> Tensor:
        """The convolution, times a factor per output."""
        sides = self.sizes(grid)
        factor = None if factor is None else factor.unflatten(1, sides)
        causal = self.filter.causal
        mixed = long_conv(tokens.unflatten(1, sides), self.kernel_for(grid), factor, causal=causal, form=self.form)
        return mixed.flatten(1, -2)

    def kernel_for(self, grid: Grid) -> Tensor:
        """The kernel, in eval mode made once for a grid unless that is not wanted."""
        if self.training or not self.reuse:
            return self.kernel(grid)
        return derived(self, ("kernel", grid), self.sources(), lambda: self.kernel(grid))

    def kernel(self, grid: Grid) -> Tensor:
        """The kernel for a grid. The factor per channel is a part of the tap at the center."""
        kernel: Tensor = self.filter(self.taps_for(grid))
        center = tuple(0 if self.filter.causal else taps // 2 for taps in kernel.shape[:-1])
        kernel = kernel.clone()
        kernel[center] += full(self.bias)
        return kernel

    def sources(self) -> list[Tensor]:
        """Everything that the kernel is made from."""
        return [self.bias, *self.filter.sources()]

    @torch.no_grad()
    def fixed(self, grid: Grid) -> FixedConv:
        """This layer as it stands for one grid, for a graph that other programs run."""
        return FixedConv(self.kernel(grid), self.sizes(grid), causal=self.filter.causal)

    def sizes(self, grid: Grid) -> tuple[int, ...]:
        """The places along each axis of the convolution."""
        raise NotImplementedError

    def taps_for(self, grid: Grid) -> tuple[int, ...]:
        raise NotImplementedError


class SequenceConv(LongConv):
    """Along the tokens, whose number decides the taps."""

    def taps_for(self, grid: Grid) -> tuple[int, ...]:
        return taps_behind(grid) if self.filter.causal else taps_both_ways(grid)

    def sizes(self, grid: Grid) -> tuple[int, ...]:
        return (grid.image_tokens,)


class PlaneConv(LongConv):
    """Over the plane. A kernel that grows is as large as it takes for every place to see every other."""

    def __init__(self, filter: ImplicitFilter, dim: int, *, grows: bool, form: Form | None, reuse: bool) -> None:
        super().__init__(filter, dim, form=form, reuse=reuse)
        self.grows = grows

    def taps_for(self, grid: Grid) -> tuple[int, ...]:
        if not self.grows:
            return self.filter.taps
        return tuple(max(sides) for sides in zip(self.filter.taps, taps_around(grid), strict=True))

    def sizes(self, grid: Grid) -> tuple[int, ...]:
        return grid.height, grid.width


class SeparableConv(nn.Module):
    """Explicit kernels: 1 x k, then k x 1, each with a bias (Table 3, as in the released code)."""

    def __init__(self, dim: int, kernel: tuple[int, int]) -> None:
        super().__init__()
        height, width = kernel
        self.across = DepthwiseConv(dim, (1, width), bias=True)
        self.down = DepthwiseConv(dim, (height, 1), bias=True)

    def forward(self, tokens: Tensor, grid: Grid, factor: Tensor | None = None) -> Tensor:
        out = grid.from_map(self.down(self.across(grid.to_map(tokens))))
        return out if factor is None else out * factor


# -- the mixer -----------------------------------------------------------------------------------


class Hyena(Mixer):
    """Projections with a short convolution each: two are multiplied, convolved, multiplied with the third, and so on.

    The released code names them backwards in a sequence and forwards in the plane: `gate_first`.
    """

    outruns_compilers = True
    explains = ("kernels", "window")
    linears = ("project", "out")

    def __init__(
        self,
        dim: int,
        convs: Sequence[LongConv | SeparableConv],
        short: tuple[int, int],
        *,
        causal: bool,
        gate_first: bool,
        norm: bool,
    ) -> None:
        super().__init__()
        first, *further = convs
        self.causal, self.gate_first, self.plane = causal, gate_first, not isinstance(first, SequenceConv)
        wide = (len(convs) + 2) * dim
        self.project = nn.Linear(dim, wide)
        self.short = nn.Conv2d(wide, wide, short, groups=wide) if causal else DepthwiseConv(wide, short, bias=True)
        self.conv = first
        self.further: Modules[LongConv | SeparableConv] = Modules(further)  # of an order above 2
        self.inner_norm = nn.LayerNorm(dim, eps=NORM_EPS, bias=False) if norm else nn.Identity()
        self.outer_norm = nn.LayerNorm(dim, eps=NORM_EPS, bias=False) if norm else nn.Identity()
        self.out = nn.Linear(dim, dim)

    @property
    def last_layer(self) -> nn.Linear:
        return self.out

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        bare = Grid(grid.height, grid.width)
        product, *gates = self.gated(through(self.project, grid.image(tokens)), bare)
        mixed = self.conv(product, bare, gates[0])
        for conv, gate in zip(self.further, gates[1:], strict=True):
            mixed = conv(mixed, bare, gate)
        return grid.behind_zeros(through(self.out, normed(self.outer_norm, mixed)))

    @property
    def roles(self) -> tuple[int, ...]:
        """Which two projections are multiplied first, and which one comes after each convolution."""
        count = len(self.further) + 3
        forwards = tuple(range(count))
        return (count - 2, count - 1, *reversed(forwards[: count - 2])) if self.gate_first else forwards

    def gated(self, wide: Tensor, grid: Grid) -> tuple[Tensor, ...]:
        """The normed product of two parts behind the short convolution, and the others, each (B, H*W, C)."""
        one, other, *rest = self.roles
        parts = self.shorten(wide, grid).chunk(len(self.roles), -1)
        return normed(self.inner_norm, parts[one], parts[other]), *(parts[place] for place in rest)

    def over(self, grid: Grid) -> Grid:
        """What the short convolution goes over: the plane or the tokens."""
        return grid if self.plane else Grid(1, grid.image_tokens)

    def shorten(self, wide: Tensor, grid: Grid) -> Tensor:
        over = self.over(grid)
        image = over.to_map(wide)
        image = F.pad(image, (self.short.kernel_size[1] - 1, 0)) if self.causal else image
        return over.from_map(self.short(image))

    def explain(self, tokens: Tensor, grid: Grid) -> dict[str, Tensor]:
        """The kernels of the first long convolution on this grid and the window that fades them out, (C, taps...).

        An explicit kernel has no window: it is 1.
        """
        if isinstance(self.conv, SeparableConv):
            kernels = (self.conv.down.weight * self.conv.across.weight).detach()[:, 0]
            return {"kernels": kernels, "window": torch.ones_like(kernels)}
        filter, taps = self.conv.filter, self.conv.taps_for(grid)
        window = filter.window(filter.resample(filter.distance.detach(), taps))
        shown = {"kernels": filter(taps), "window": window}
        return {name: values.detach().movedim(-1, 0) for name, values in shown.items()}

    def kernel_sources(self) -> tuple[nn.Module, ...]:
        parts: list[nn.Module] = []
        for conv in (self.conv, *self.further):
            parts += (conv.across, conv.down) if isinstance(conv, SeparableConv) else (conv.filter,)
        return tuple(parts)


def sequence_stage(options: HyenaOptions, dim: int, depth: int, grid: Grid, *, causal: bool) -> StageParts:
    """Mixers along the tokens. The features begin with the time, as in the released code."""
    taps_of = taps_behind if causal else taps_both_ways
    (taps,) = taps_of(grid)
    period = grid.image_tokens if causal else 2 * grid.image_tokens

    def conv() -> SequenceConv:
        time = torch.linspace(0, 1, taps)[:, None] if taps > 1 else torch.zeros(1, 1)
        filter = ImplicitFilter(
            dim,
            torch.cat([time, features_1d(taps, options.bands, period)], 1),
            distance_1d(taps, causal=causal),
            torch.linspace(*DECAY, dim),
            hidden=options.hidden or 4 * options.bands,
            layers=options.layers,
            window="fixed",
            causal=causal,
            taps_of=taps_of,
        )
        return SequenceConv(filter, dim, form=options.form, reuse=options.reuse)

    def mixer() -> Hyena:
        convs = [conv() for _ in range(options.order - 1)]
        return Hyena(dim, convs, (1, options.short), causal=causal, gate_first=True, norm=options.norm)

    return StageParts.of(mixer() for _ in range(depth))


@MIXERS.register("hyena", HyenaOptions)
def build_causal_stage(options: HyenaOptions, dim: int, depth: int, reference_grid: Grid) -> StageParts:
    return sequence_stage(options, dim, depth, reference_grid, causal=True)


@MIXERS.register("hyena_bidirectional", HyenaOptions)
def build_bidirectional_stage(options: HyenaOptions, dim: int, depth: int, reference_grid: Grid) -> StageParts:
    return sequence_stage(options, dim, depth, reference_grid, causal=False)


@MIXERS.register("hyena_pixel", HyenaPixelOptions)
def build_plane_stage(options: HyenaPixelOptions, dim: int, depth: int, reference_grid: Grid) -> StageParts:
    given = options.kernel or taps_around(reference_grid)
    height, width = (given, given) if isinstance(given, int) else given

    def conv() -> PlaneConv | SeparableConv:
        if options.filter == "separable":
            return SeparableConv(dim, (height, width))
        flat = features_1d(height * width, options.bands, height * width)
        filter = ImplicitFilter(
            dim,
            features_2d(height, width, options.bands)
            if options.features == "2d"
            else flat.unflatten(0, (height, width)),
            distance_2d(height, width),
            torch.linspace(*DECAY, dim) / max(height, width),
            hidden=options.hidden or 4 * options.bands,
            layers=options.layers,
            window="learned",
            causal=False,
            taps_of=None if options.kernel else taps_around,
        )
        grows = options.larger == "resample"
        return PlaneConv(filter, dim, grows=grows, form=options.form, reuse=options.reuse)

    def mixer() -> Hyena:
        convs = [conv() for _ in range(options.order - 1)]
        short = (options.short, options.short)
        return Hyena(dim, convs, short, causal=False, gate_first=False, norm=options.norm)

    return StageParts.of(mixer() for _ in range(depth))
