"""Hyena: a product of two projections, one global convolution, a product with the third (HyenaPixel, Eq. 4).

`hyena` looks back along the tokens, `hyena_bidirectional` (H_b) both ways, `hyena_pixel` (H_px) over the plane.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixlab.errors import require
from mixlab.grid import Grid
from mixlab.guards import without_autocast
from mixlab.mixers.base import MIXERS, Mixer, StageParts
from mixlab.modules import Modules
from mixlab.ops.longconv import Form, Prepared, convolve, prepare_1d, prepare_2d
from mixlab.ops.resample import resample_taps

NORM_EPS = 1e-5
DECAY = (math.log(0.01) / 1.5, math.log(0.01) / 0.3)  # of the first and the last channel
LONGEST_PERIOD = 10000.0
KEPT_NUMBERS = 2**21  # a spectrum with more is made anew from the kept kernel: 8 MB per layer


@dataclass(frozen=True)
class HyenaOptions:
    """`bands`: frequencies of the position features; `hidden` and `layers`: width (4 * bands unless given) and inner
    layers of the network that makes the filter; `short`: taps of the convolution behind the projections; `norm`: layer
    norms behind the first and the last product. `form` and `reuse` say how it is computed, not what: `form` forces one
    form of the long convolution, `reuse` keeps filters in eval mode until something changes.
    """

    bands: int = 16
    hidden: int | None = None
    layers: int = 2
    short: int = 3
    norm: bool = False
    form: Form | None = field(default=None, compare=False)
    reuse: bool = field(default=True, compare=False)

    def __post_init__(self) -> None:
        require(self.bands >= 1, f"bands of 1 or more; got {self.bands}.")
        require(self.hidden is None or self.hidden >= 1, f"a hidden width of 1 or more; got {self.hidden}.")
        require(self.layers >= 0, f"layers of 0 or more; got {self.layers}.")
        require(self.short >= 1 and self.short % 2 == 1, f"an odd short kernel; got {self.short}.")


@dataclass(frozen=True)
class HyenaPixelOptions:
    """As for Hyena, and `kernel`: a side or (height, width), by default so large that every place sees every other at
    the model's own image size. `filter`: "separable" has explicit k x 1 and 1 x k kernels. `features` of the positions:
    of both axes, or of the taps row by row. `larger` grids: zeros around ("pad"), or a kernel that grows with the grid
    ("resample").
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
    form: Form | None = field(default=None, compare=False)
    reuse: bool = field(default=True, compare=False)

    def __post_init__(self) -> None:
        HyenaOptions(self.bands, self.hidden, self.layers, self.short)
        sides = self.kernel if isinstance(self.kernel, tuple) else (self.kernel or 1,) * 2
        odd = len(sides) == 2 and all(side >= 1 and side % 2 == 1 for side in sides)
        require(odd, f"a kernel of one or two odd sides; got {self.kernel}.")
        require(self.features == "1d" or self.bands % 2 == 0, f"even bands, half per axis; got {self.bands}.")
        fixed = self.filter == "separable" and self.larger == "resample"
        require(not fixed, "larger = 'pad' for separable kernels: they have no position features to resample.")


# -- where the taps are --------------------------------------------------------------------------


def features_1d(taps: int, bands: int, period: int) -> Tensor:
    """exp(2 pi i k t / L) for k < bands as real and imaginary parts (Eq. 2), (taps, 2 * bands)."""
    angle = torch.arange(taps)[:, None] * torch.arange(bands) * (2 * math.pi / period)
    return torch.cat([angle.cos(), angle.sin()], 1)


def features_2d(height: int, width: int, bands: int) -> Tensor:
    """Half the bands for each axis, with periods up to 10000 taps (Eq. 5), (height, width, 2 * bands)."""
    frequencies = LONGEST_PERIOD ** (-torch.arange(bands // 2) * 2 / bands)
    across = (torch.arange(width)[:, None] * frequencies).expand(height, -1, -1)
    down = (torch.arange(height)[:, None, None] * frequencies).expand(-1, width, -1)
    angle = torch.cat([across, down], 2)
    return torch.cat([angle.cos(), angle.sin()], 2)


def distance_1d(taps: int, *, causal: bool) -> Tensor:
    """How far each tap is from the centre, or the first tap: 0 there, 1 at the ends."""
    if causal:
        return torch.linspace(0, 1, taps)
    return torch.linspace(-1, 1, taps).abs() if taps > 1 else torch.zeros(1)


def distance_2d(height: int, width: int) -> Tensor:
    """The distance from the centre in taps."""
    rows, columns = (torch.arange(side) - (side - 1) / 2 for side in (height, width))
    return torch.hypot(rows[:, None], columns)


# -- the filter ----------------------------------------------------------------------------------


class ImplicitFilter(nn.Module):
    """Kernels (taps..., C) from a network with sine activations over position features, faded out with the distance.

    The features are learned in every variant. Over the plane (`window` "learned") so are the decay and a shift of it,
    and the distances are frozen parameters, as in the released code; along a sequence both are constants.
    """

    undecayed = ("positions",)

    def __init__(
        self,
        dim: int,
        positions: Tensor,
        distance: Tensor,
        decay: Tensor,
        *,
        hidden: int,
        layers: int,
        window: Literal["fixed", "learned"],
        causal: bool,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.positions = nn.Parameter(positions)
        widths = [positions.shape[-1], *[hidden] * (layers + 1)]
        self.linears: Modules[nn.Linear] = Modules(
            nn.Linear(before, behind) for before, behind in zip(widths[:-1], widths[1:], strict=True)
        )
        self.frequencies = nn.ParameterList(torch.ones(hidden) for _ in self.linears)
        self.out = nn.Linear(hidden, dim, bias=False)
        if window == "learned":
            self.distance: Tensor = nn.Parameter(distance, requires_grad=False)
            self.decay: Tensor = nn.Parameter(decay)
            self.shift = nn.Parameter(torch.zeros(dim))
        else:
            self.register_buffer("distance", distance)
            self.register_buffer("decay", decay)
            self.shift = None

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(self.positions.shape[:-1])

    def forward(self, taps: tuple[int, ...]) -> Tensor:
        """The kernels with so many taps per axis: the features and distances are resampled to them."""
        with without_autocast(self.positions):
            hidden = full(self.resample(self.positions, taps))
            for linear, frequency in zip(self.linears, self.frequencies, strict=True):
                hidden = torch.sin(full(frequency) * F.linear(hidden, full(linear.weight), full(linear.bias)))
            return F.linear(hidden, full(self.out.weight)) * self.window(taps)

    def window(self, taps: tuple[int, ...]) -> Tensor:
        """exp(-decay * distance) + shift (Eqs. 3 and 6), (taps..., C)."""
        distance = full(self.resample(self.distance, taps))[..., None]
        faded = torch.exp(-distance * full(self.decay).abs())
        return faded if self.shift is None else faded + full(self.shift)

    def resample(self, values: Tensor, taps: tuple[int, ...]) -> Tensor:
        for axis, size in enumerate(taps):
            values = resample_taps(values, size, axis=axis, centred=not self.causal)
        return values

    def resize(self, name: str, value: Tensor, source: Grid | None) -> Tensor:
        """Stored features or distances of another number of taps."""
        own = getattr(self, name)
        if name not in ("positions", "distance") or value.ndim != own.ndim or value.shape[2:] != own.shape[2:]:
            return value  # for the caller to report
        return self.resample(value, self.taps)


def full(values: Tensor) -> Tensor:
    """Filters are made in float32 at least."""
    return values if values.dtype is torch.float64 else values.float()


# -- the long convolution ------------------------------------------------------------------------


class Entry(NamedTuple):
    grid: Grid
    sources: list[Tensor]
    kernel: Prepared | Tensor


class Kept:
    """What eval mode keeps of a layer's filter. Copies of a layer and files start with nothing."""

    def __init__(self) -> None:
        self.entry: Entry | None = None

    def __deepcopy__(self, memo: object) -> "Kept":
        return Kept()

    def __reduce__(self) -> tuple[type["Kept"], tuple[()]]:
        return Kept, ()


class LongConv(nn.Module):
    """A convolution with implicit kernels plus a factor per channel, over (B, N, C).

    In eval mode, without gradients for the filter, the kernels are made once and used until a value that they are made
    from changes (values are compared, since not every change leaves a trace on a tensor), or the grid.
    """

    undecayed = ("bias",)

    def __init__(self, filter: ImplicitFilter, dim: int, *, form: Form | None, reuse: bool) -> None:
        super().__init__()
        self.filter = filter
        self.bias = nn.Parameter(torch.randn(dim))
        self.form, self.reuse = form, reuse
        self.kept = Kept()

    def train(self, mode: bool = True) -> "LongConv":
        if mode:
            self.kept.entry = None
        return super().train(mode)

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        kernel = self.kernel(grid)
        ready = kernel if isinstance(kernel, Prepared) else self.prepare(kernel, grid)
        return self.convolve(tokens, ready, grid)

    def kernel(self, grid: Grid) -> Prepared | Tensor:
        """The kernel for a grid: made now, or kept from an earlier call."""
        sources = [*self.filter.parameters(), *self.filter.buffers()]
        if not self.may_keep(sources):
            return self.filter(self.taps_for(grid))
        entry = self.kept.entry
        if entry is None or entry.grid != grid or not unchanged(entry.sources, sources):
            with torch.inference_mode(False), torch.no_grad():  # what is kept may meet gradients later
                entry = Entry(grid, [source.clone() for source in sources], self.to_keep(grid))
            self.kept.entry = entry
        return entry.kernel

    def to_keep(self, grid: Grid) -> Prepared | Tensor:
        kernel = self.filter(self.taps_for(grid))
        ready = self.prepare(kernel, grid)
        return ready if ready.kernel.numel() <= KEPT_NUMBERS else kernel

    def may_keep(self, sources: list[Tensor]) -> bool:
        """Not while a filter is learned or traced, and not for tensors without plain values."""
        if self.training or not self.reuse or torch.compiler.is_compiling():
            return False
        if torch.is_grad_enabled() and any(source.requires_grad for source in sources):
            return False
        return not any(source.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(source) for source in sources)

    def taps_for(self, grid: Grid) -> tuple[int, ...]:
        raise NotImplementedError

    def prepare(self, kernel: Tensor, grid: Grid) -> Prepared:
        raise NotImplementedError

    def convolve(self, tokens: Tensor, ready: Prepared, grid: Grid) -> Tensor:
        raise NotImplementedError


class SequenceConv(LongConv):
    """Along the tokens, whose number decides the taps."""

    def taps_for(self, grid: Grid) -> tuple[int, ...]:
        return (grid.image_tokens if self.filter.causal else 2 * grid.image_tokens - 1,)

    def prepare(self, kernel: Tensor, grid: Grid) -> Prepared:
        return prepare_1d(kernel, grid.image_tokens, causal=self.filter.causal, form=self.form)

    def convolve(self, tokens: Tensor, ready: Prepared, grid: Grid) -> Tensor:
        return convolve(tokens, ready, self.bias)


class PlaneConv(LongConv):
    """Over the plane. On grids larger than `reference` the kernel may grow as they do."""

    def __init__(
        self, filter: ImplicitFilter, dim: int, reference: Grid, *, grows: bool, form: Form | None, reuse: bool
    ) -> None:
        super().__init__(filter, dim, form=form, reuse=reuse)
        self.reference, self.grows = Grid(reference.height, reference.width), grows

    def taps_for(self, grid: Grid) -> tuple[int, ...]:
        if not self.grows:
            return self.filter.taps
        sides = zip(self.filter.taps, grid[:2], self.reference[:2], strict=True)
        return tuple(max(taps, 2 * round((taps + 1) / 2 * size / own) - 1) for taps, size, own in sides)

    def prepare(self, kernel: Tensor, grid: Grid) -> Prepared:
        return prepare_2d(kernel, grid.height, grid.width, form=self.form)

    def convolve(self, tokens: Tensor, ready: Prepared, grid: Grid) -> Tensor:
        image = tokens.unflatten(1, (grid.height, grid.width))
        return convolve(image, ready, self.bias).flatten(1, 2)


class SeparableConv(nn.Module):
    """Explicit kernels k x 1, then 1 x k, plus a factor per channel (Table 3)."""

    undecayed = ("bias",)

    def __init__(self, dim: int, kernel: tuple[int, int]) -> None:
        super().__init__()
        height, width = kernel
        self.down = nn.Conv2d(dim, dim, (height, 1), padding=(height // 2, 0), groups=dim, bias=False)
        self.across = nn.Conv2d(dim, dim, (1, width), padding=(0, width // 2), groups=dim, bias=False)
        self.bias = nn.Parameter(torch.randn(dim))

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        return grid.from_map(self.across(self.down(grid.to_map(tokens)))) + self.bias * tokens


def unchanged(before: list[Tensor], now: list[Tensor]) -> bool:
    return len(before) == len(now) and all(map(same, before, now))


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bits in the same place. NumPy compares them thirty times as fast as PyTorch."""
    if one.device != other.device or one.dtype is not other.dtype or one.shape != other.shape:
        return False
    if one.device.type != "cpu":
        return torch.equal(one, other.detach())
    bits = BITS[one.element_size()]
    return bool((one.view(bits).numpy() == other.detach().view(bits).numpy()).all())


BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


# -- the mixer -----------------------------------------------------------------------------------


class Hyena(Mixer):
    """Three projections with a short convolution each; two are multiplied, convolved and multiplied with the third.

    The released code calls the third one first in a sequence and last in the plane: `gate_first`.
    """

    explains = ("kernels",)

    def __init__(
        self, dim: int, conv: LongConv | SeparableConv, short: tuple[int, int], *, causal: bool, gate_first: bool, norm: bool
    ) -> None:
        super().__init__()
        self.causal, self.gate_first, self.plane = causal, gate_first, not isinstance(conv, SequenceConv)
        self.project = nn.Linear(dim, 3 * dim)
        padding = (0, 0) if causal else (short[0] // 2, short[1] // 2)
        self.short = nn.Conv2d(3 * dim, 3 * dim, short, padding=padding, groups=3 * dim)
        self.conv = conv
        self.inner_norm = nn.LayerNorm(dim, eps=NORM_EPS, bias=False) if norm else nn.Identity()
        self.outer_norm = nn.LayerNorm(dim, eps=NORM_EPS, bias=False) if norm else nn.Identity()
        self.out = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        bare = Grid(grid.height, grid.width)
        parts = self.shorten(self.project(grid.image(tokens)), bare).chunk(3, -1)  # each (B, H*W, C)
        gate, one, other = parts if self.gate_first else (parts[2], parts[0], parts[1])
        mixed = self.conv(self.inner_norm(one * other), bare)
        return grid.behind_zeros(self.out(self.outer_norm(mixed * gate)))

    def shorten(self, wide: Tensor, grid: Grid) -> Tensor:
        """The short convolution, over the plane or along the tokens."""
        over = grid if self.plane else Grid(1, grid.image_tokens)
        image = over.to_map(wide)
        image = F.pad(image, (self.short.kernel_size[1] - 1, 0)) if self.causal else image
        return over.from_map(self.short(image))

    def explain(self, tokens: Tensor, grid: Grid) -> dict[str, Tensor]:
        """The long kernels for this grid, (C, taps...)."""
        if isinstance(self.conv, SeparableConv):
            return {"kernels": (self.conv.down.weight * self.conv.across.weight).detach()[:, 0]}
        return {"kernels": self.conv.filter(self.conv.taps_for(grid)).detach().movedim(-1, 0)}


def sequence_stage(options: HyenaOptions, dim: int, depth: int, grid: Grid, *, causal: bool) -> StageParts:
    """Mixers along the tokens. The features begin with the time, as in the released code."""
    taps = grid.image_tokens if causal else 2 * grid.image_tokens - 1
    period = grid.image_tokens if causal else 2 * grid.image_tokens

    def mixer() -> Hyena:
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
        )
        conv = SequenceConv(filter, dim, form=options.form, reuse=options.reuse)
        return Hyena(dim, conv, (1, options.short), causal=causal, gate_first=True, norm=options.norm)

    return StageParts.of(mixer() for _ in range(depth))


@MIXERS.register("hyena", HyenaOptions)
def build_causal_stage(options: HyenaOptions, dim: int, depth: int, reference_grid: Grid) -> StageParts:
    return sequence_stage(options, dim, depth, reference_grid, causal=True)


@MIXERS.register("hyena_bidirectional", HyenaOptions)
def build_bidirectional_stage(options: HyenaOptions, dim: int, depth: int, reference_grid: Grid) -> StageParts:
    return sequence_stage(options, dim, depth, reference_grid, causal=False)


@MIXERS.register("hyena_pixel", HyenaPixelOptions)
def build_plane_stage(options: HyenaPixelOptions, dim: int, depth: int, reference_grid: Grid) -> StageParts:
    given = options.kernel or (2 * reference_grid.height - 1, 2 * reference_grid.width - 1)
    height, width = (given, given) if isinstance(given, int) else given

    def conv() -> PlaneConv | SeparableConv:
        if options.filter == "separable":
            return SeparableConv(dim, (height, width))
        flat = features_1d(height * width, options.bands, height * width)
        filter = ImplicitFilter(
            dim,
            features_2d(height, width, options.bands) if options.features == "2d" else flat.unflatten(0, (height, width)),
            distance_2d(height, width),
            torch.linspace(*DECAY, dim) / max(height, width),
            hidden=options.hidden or 4 * options.bands,
            layers=options.layers,
            window="learned",
            causal=False,
        )
        grows = options.larger == "resample"
        return PlaneConv(filter, dim, reference_grid, grows=grows, form=options.form, reuse=options.reuse)

    short = (options.short, options.short)
    return StageParts.of(
        Hyena(dim, conv(), short, causal=False, gate_first=False, norm=options.norm) for _ in range(depth)
    )
