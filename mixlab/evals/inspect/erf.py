"""Which pixels the center of a feature map listens to: the effective receptive field (Sequencer, appendix D)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from mixlab.core.errors import ConfigError, ImageError, near_misses, require
from mixlab.evals import timm_places
from mixlab.models.backbone import Backbone
from mixlab.models.model import Model

Maps = Callable[[Tensor], Mapping[str, Tensor]]
Part = Literal["positive", "absolute"]
PARTS = ("positive", "absolute")
SHARES = (0.2, 0.5, 0.9)
CANCELED = 1e-4  # a sum over channels that moves less than this share of what single channels do is rounding


@dataclass(frozen=True, kw_only=True, eq=False)
class Field:
    """The effective receptive field of one place in a model."""

    contribution: Tensor  # (H, W) float64: Equation 8 summed over channels, the mean over images
    grid: tuple[int, int]  # of the feature map whose center was asked
    images: int
    canceled: bool = False  # the channels' sum does not depend on the image, as behind a fresh LayerNorm

    @property
    def score(self) -> Tensor:
        """Equation 9, (H, W), not rescaled."""
        return (self.images * self.contribution + 1).log10()

    @property
    def empty(self) -> bool:
        return self.canceled or not self.contribution.sum() > 0

    def area(self, share: float) -> float | None:
        """The smallest share of the image that holds this share of the contribution."""
        return None if self.empty else area_of(self.contribution, share)

    @property
    def in_cross(self) -> float | None:
        """The share of the contribution in the rows and columns of the center cell."""
        if self.empty:
            return None
        rows, columns = self.bands()
        return float(self.contribution[rows[:, None] | columns].sum() / self.contribution.sum())

    @property
    def cross(self) -> float | None:
        """Cross-shapedness, see `cross_of`; None where there is nothing outside the center cell."""
        return None if self.empty else cross_of(self.contribution, *self.bands())

    def bands(self) -> tuple[Tensor, Tensor]:
        """Which rows and which columns of pixels the center cell covers, (H,) and (W,)."""
        rows, columns = (band(side, cells) for side, cells in zip(self.contribution.shape, self.grid, strict=True))
        return rows, columns


# -- measuring -----------------------------------------------------------------------------------


def measure_fields(
    maps_of: Maps, batches: Iterable[Tensor], *, part: Part = "positive", watch: Callable[[int], None] | None = None
) -> dict[str, Field]:
    """The field of each NCHW map that `maps_of(images)` names, over batches of images (B, C, H, W) of one size.

    `part` is what counts of a gradient: "positive" as in Equation 8, or "absolute". The images of a batch must not
    influence each other: a model is in eval mode.
    """
    if part not in PARTS:
        raise ConfigError(f"The part of the gradient is one of {', '.join(PARTS)}; got {part!r}.")
    sums: dict[str, Tensor] = {}
    grids: dict[str, tuple[int, int]] = {}
    canceled: set[str] = set()
    count = 0
    for batch in batches:
        with torch.inference_mode(False), torch.enable_grad():
            images = batch.detach().clone().requires_grad_()
            for name, features in maps_of(images).items():
                check_map(name, features)
                center = features[:, :, features.shape[2] // 2, features.shape[3] // 2]  # (B, C)
                gradient = gradient_of(center.sum(), images)
                if not count:
                    grids[name] = (features.shape[2], features.shape[3])
                    if cancels(center, images, gradient):
                        canceled.add(name)
                kept = gradient.relu() if part == "positive" else gradient.abs()
                summed = kept.cpu().double().sum((0, 1))  # (H, W)
                if name in sums and sums[name].shape != summed.shape:
                    raise ImageError(f"All images must have one size; got {sums[name].shape} and {summed.shape}.")
                sums[name] = sums[name] + summed if name in sums else summed
        count += len(batch)
        if watch is not None:
            watch(len(batch))
    require(count > 0, "at least one image.")
    return {
        name: Field(contribution=total / count, grid=grids[name], images=count, canceled=name in canceled)
        for name, total in sums.items()
    }


def check_map(name: str, features: Tensor) -> None:
    if features.ndim != 4:
        raise ImageError(f"A receptive field needs a map (B, C, H, W); {name!r} has shape {tuple(features.shape)}.")


def gradient_of(value: Tensor, images: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(value, images, retain_graph=True, materialize_grads=True)
    return gradient


def cancels(center: Tensor, images: Tensor, gradient: Tensor) -> bool:
    """Whether single channels depend on the image but their sum does not."""
    signs = torch.randint(0, 2, center.shape[1:], generator=torch.Generator().manual_seed(0)) * 2 - 1
    single = gradient_of((center * signs.to(center)).sum(), images)
    return bool(gradient.abs().sum() < CANCELED * single.abs().sum())


# -- numbers -------------------------------------------------------------------------------------


def band(side: int, cells: int) -> Tensor:
    """The pixels along a side that the center cell, number floor(cells / 2), covers; (side,) booleans."""
    step = max(1, round(side / cells))
    first = min(cells // 2 * step, side - 1)
    places = torch.arange(side)
    return (places >= first) & (places < first + step)


def area_of(contribution: Tensor, share: float) -> float:
    """The share of pixels that hold `share` of the contribution, the largest ones first."""
    require(0 < share <= 1, f"a share of the contribution in (0, 1]; got {share}.")
    held = contribution.flatten().double().sort(descending=True).values.cumsum(0)
    enough = share * float(held[-1]) * (1 - 1e-9)  # sums of many floats
    return (int(torch.searchsorted(held, enough)) + 1) / len(held)


def cross_of(contribution: Tensor, rows: Tensor, columns: Tensor) -> float | None:
    """How much more lies in the arms of the cross than distance from the center explains: 1 is all, 0 is no more.

    Outside the center cell, every ring of pixels about equally far from the center is expected to hold the same in
    its arms as elsewhere. (found - expected) / (all - expected): a uniform or round field has 0, an X is negative.
    """
    arms, outside = rows[:, None] ^ columns, ~(rows[:, None] & columns)  # (H, W)
    down, right = (torch.arange(len(mask)) - mask.nonzero().double().mean() for mask in (rows, columns))
    ring = (down[:, None].square() + right.square()).sqrt().round().long()
    held = ring[outside].bincount(contribution[outside].double())  # one value per ring
    pixels = ring[outside].bincount(minlength=len(held))
    in_arms = ring[arms].bincount(minlength=len(held))
    expected = (held * in_arms / pixels.clamp(min=1)).sum()
    found, everything = contribution[arms].sum(), held.sum()
    room = everything - expected
    return float((found - expected) / room) if room > 1e-12 * contribution.sum() else None


# -- places --------------------------------------------------------------------------------------


def find_places(model: nn.Module, names: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Names of intermediates, or groups of them: first, last, all-stages, all-blocks, first-and-last.

    A stage is a map of the pyramid, of a model of timm a feature map behind the stem. `first` is the first block;
    `last` is the last place of a Mixlab model, and the last block of a model of timm.
    """
    stages, blocks, last = places_of_backbone(model, names) if isinstance(model, Model) else places_of_timm(model)
    groups = {"first": blocks[:1], "last": last, "all-stages": stages, "all-blocks": blocks}
    groups["first-and-last"] = [*blocks[:1], *blocks[-1:]]
    found: list[str] = []
    for name in wanted:
        if name in groups:
            require(bool(groups[name]), f"the name of a module: the blocks of {type(model).__name__} are not known.")
        elif not isinstance(model, Model):
            timm_places.check_module(model, name, groups)
        elif name not in names:
            raise ConfigError(f"The model has no intermediate {name!r}. {near_misses(name, [*names, *groups])}")
        found += groups.get(name, [name])
    return list(dict.fromkeys(found))


def places_of_backbone(model: Model, names: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Stages, blocks and the last place."""
    blocks = [name for name in names if ".blocks." in name] or list(names)
    stages = [name for name in names if ".blocks." not in name and not name.endswith("stem")]
    if isinstance(model, Backbone) and model.config.taps:
        stages = list(dict.fromkeys(model.pyramid_names))
    return stages, blocks, list(names[-1:])


def places_of_timm(model: nn.Module) -> tuple[list[str], list[str], list[str]]:
    """Stages, blocks and the last block; one kind stands for the other where a model has only one of them."""
    stages = timm_places.stage_names(model)
    blocks = timm_places.block_names(model) or stages
    return stages or blocks, blocks, blocks[-1:]
