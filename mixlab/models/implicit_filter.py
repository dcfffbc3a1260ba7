"""Convolution kernels that a small network makes from positions, for any number of taps (HyenaPixel, section 3)."""

import itertools
import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixlab.core.grid import Grid
from mixlab.core.guards import without_autocast
from mixlab.models.modules import Modules
from mixlab.ops.resample import resample_taps

DECAY = (math.log(0.01) / 1.5, math.log(0.01) / 0.3)  # of the first and the last channel
LONGEST_PERIOD = 10000.0
TAPS_AT_ONCE = 2**14  # of a kernel that is made without gradients


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


TapsOf = Callable[[Grid], tuple[int, ...]]


def taps_behind(grid: Grid) -> tuple[int, ...]:
    return (grid.image_tokens,)


def taps_both_ways(grid: Grid) -> tuple[int, ...]:
    return (2 * grid.image_tokens - 1,)


def taps_around(grid: Grid) -> tuple[int, ...]:
    return (2 * grid.height - 1, 2 * grid.width - 1)


class ImplicitFilter(nn.Module):
    """Kernels (taps..., C) from a network with sine activations over position features, faded out with the distance.

    The features are learned in every variant. Over the plane (`window` "learned") so are the decay and a shift of it,
    and the distances are frozen parameters, as in the released code; along a sequence both are constants. `taps_of`
    tells the taps for a grid where these follow from it: then weights of another image size can be resampled.
    """

    undecayed = ("positions", "distance")
    undecayed_here_only = ("positions", "frequencies", "decay", "shift")  # these decayed in the released training

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
        taps_of: TapsOf | None,
    ) -> None:
        super().__init__()
        self.causal, self.taps_of = causal, taps_of
        self.positions = nn.Parameter(positions)
        widths = [positions.shape[-1], *[hidden] * (layers + 1)]
        self.linears: Modules[nn.Linear] = Modules(
            nn.Linear(before, behind) for before, behind in itertools.pairwise(widths)
        )
        self.frequencies = nn.ParameterList(torch.ones(hidden) for _ in self.linears)
        self.out = nn.Linear(hidden, dim, bias=False)
        learned = window == "learned"
        if learned:
            self.distance: Tensor = nn.Parameter(distance, requires_grad=False)
            self.decay: Tensor = nn.Parameter(decay)
        else:
            self.register_buffer("distance", distance)
            self.register_buffer("decay", decay)
        self.shift = nn.Parameter(torch.zeros(dim)) if learned else None

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(self.positions.shape[:-1])

    def forward(self, taps: tuple[int, ...]) -> Tensor:
        """The kernels with so many taps per axis: the features and distances are resampled to them."""
        positions, distance = self.resample(self.positions, taps), self.resample(self.distance.detach(), taps)
        with without_autocast(self.positions):
            if torch.is_grad_enabled() or torch.compiler.is_compiling() or distance.numel() <= TAPS_AT_ONCE:
                return self.network(positions) * self.window(distance)
            parts = zip(
                positions.flatten(0, -2).split(TAPS_AT_ONCE), distance.flatten().split(TAPS_AT_ONCE), strict=True
            )
            kernel = torch.cat([self.network(places).mul_(self.window(distances)) for places, distances in parts])
            return kernel.unflatten(0, taps)

    def network(self, positions: Tensor) -> Tensor:
        """(taps..., E) to (taps..., C)."""
        hidden = full(positions)
        for linear, frequency in zip(self.linears, self.frequencies, strict=True):
            hidden = torch.sin(full(frequency) * full_linear(linear, hidden))
        return full_linear(self.out, hidden)

    def window(self, distance: Tensor) -> Tensor:
        """exp(-decay * distance) + shift (Eqs. 3 and 6), (taps..., C)."""
        faded = torch.exp(-full(distance)[..., None] * full(self.decay).abs())
        return faded if self.shift is None else faded + full(self.shift)

    def sources(self) -> list[Tensor]:
        """Everything that the kernels are made from."""
        return [*self.parameters(), *self.buffers()]

    def resample(self, values: Tensor, taps: tuple[int, ...]) -> Tensor:
        for axis, size in enumerate(taps):
            values = resample_taps(values, size, axis=axis, centred=not self.causal)
        return values

    def resize(self, name: str, value: Tensor, source: Grid | None) -> Tensor:
        """Stored features or distances of another number of taps."""
        own = getattr(self, name)
        axes = len(self.taps)
        if name not in ("positions", "distance") or value.ndim != own.ndim or value.shape[axes:] != own.shape[axes:]:
            return value  # for the caller to report
        return self.resample(value, self.taps) if self.belongs(tuple(value.shape[:axes]), source) else value

    def belongs(self, taps: tuple[int, ...], source: Grid | None) -> bool:
        """Whether so many taps belong to a model of another image size, and not to another kind of kernel."""
        if taps == self.taps or self.taps_of is None:
            return taps == self.taps
        if source is not None:
            return taps == self.taps_of(source)
        tokens = taps[0] if self.causal else (taps[0] + 1) // 2
        side = math.isqrt(tokens) if len(taps) == 1 else tokens
        return taps == self.taps_of(Grid(side, side))  # files of other code belong to square images


def full(values: Tensor) -> Tensor:
    """Filters are made in float32 at least."""
    return values if values.dtype is torch.float64 else values.float()


def full_linear(linear: nn.Linear, x: Tensor) -> Tensor:
    """The layer itself, unless its weights have fewer digits."""
    if linear.weight.dtype in (torch.float32, torch.float64):
        return linear(x)
    return F.linear(x, full(linear.weight), None if linear.bias is None else full(linear.bias))
