"""The kernels that mixers have learned: as pictures (HyenaPixel, Figure 4), and how far they reach (Figure 6)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mixlab.core.errors import ConfigError, near_misses
from mixlab.core.grid import Grid
from mixlab.evals.subjects import Subject, backbone_of
from mixlab.findings.findings import Finding, Picture, finding
from mixlab.findings.panels import Panel, draw_sheet, line_chart, wrapped
from mixlab.models.backbone import Backbone
from mixlab.models.config import parse_image_size
from mixlab.models.implicit_filter import ImplicitFilter
from mixlab.models.mixers import Mixer

WINDOW = 0.05  # what the window gives less than counts as nothing (section 5)
GLOBAL = 2.0  # the coverage of attention (Figure 6)
MASS = 0.9  # the share of a kernel's mass that `reach` is asked about
CHANNELS = 48  # of a block that are drawn one by one
COLUMNS = ("block", "mixer", "grid", "taps", "coverage", "50% of mass", "90% of mass")
PANELS = 6  # in a row of a sheet


@dataclass(frozen=True, eq=False)
class BlockKernels:
    """The kernels of one mixer on one grid: (C, taps...), with one axis along the tokens or two over the plane.

    `window` is what an implicit filter is faded out with. A causal kernel begins at its center.
    """

    block: str
    mixer: str
    grid: Grid
    kernels: Tensor
    window: Tensor | None
    causal: bool

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(self.kernels.shape[1:])

    @property
    def sides(self) -> tuple[int, ...]:
        """What the taps run over: all tokens, or rows and columns."""
        return (self.grid.height, self.grid.width) if len(self.taps) == 2 else (self.grid.image_tokens,)

    @property
    def coverage(self) -> float:
        """The diameter of where the window is at least 0.05, relative to the feature map: the mean over channels and
        axes. An explicit kernel counts in full, as convolutions do in Figure 6.
        """
        if self.window is None:
            return mean([taps / side for taps, side in zip(self.taps, self.sides, strict=True)])
        kept = self.window.abs() >= WINDOW
        return mean([extent(kept, axis).mean().item() / side for axis, side in enumerate(self.sides)])

    def reach(self, share: float = MASS) -> float:
        """The diameter, relative to the map, of the centered part with this share of the kernels' absolute mass."""
        weight = self.kernels.double().abs().sum(0).flatten()
        if not weight.sum() > 0:
            return 0.0
        distance = offsets(self.taps, causal=self.causal).flatten().to(weight.device)
        order = distance.argsort()
        within = weight[order].cumsum(0) / weight.sum()
        size = distance[order][int((within < share - 1e-9).sum())].item()  # of the kernel, 0 to 1
        return mean([size * taps / side for taps, side in zip(self.taps, self.sides, strict=True)])

    def picture(self, kernel: Tensor) -> Tensor:
        """One kernel (taps...) as (height, width): taps in their order, or what the token in the center sees."""
        if len(self.taps) == 2:
            return kernel
        place = self.grid.height // 2 * self.grid.width + self.grid.width // 2
        tap = place - torch.arange(self.grid.image_tokens) + (0 if self.causal else len(kernel) // 2)
        seen = torch.where((tap >= 0) & (tap < len(kernel)), kernel[tap.clamp(0, len(kernel) - 1)], 0.0)
        return seen.unflatten(0, (self.grid.height, self.grid.width))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def extent(kept: Tensor, axis: int) -> Tensor:
    """How many taps lie between the first and the last kept one along an axis, for each channel of (C, taps...)."""
    others = [other for other in range(1, kept.ndim) if other != axis + 1]
    along = kept.any(dim=others[0]) if others else kept
    first, last = along.int().argmax(1), along.shape[1] - 1 - along.flip(1).int().argmax(1)
    return torch.where(along.any(1), last - first + 1, 0).double()


def offsets(taps: tuple[int, ...], *, causal: bool) -> Tensor:
    """The size of the smallest centered part of a kernel that has each tap, as a share of its size, (taps...).

    A part of share s holds every tap with a value of s or less.
    """
    if causal:
        return (torch.arange(taps[0]) + 1).double() / taps[0]
    sizes = [(2 * (torch.arange(count) - count // 2).abs() + 1).double() / count for count in taps]
    return sizes[0] if len(taps) == 1 else torch.maximum(sizes[0][:, None], sizes[1])


# -- of a model ----------------------------------------------------------------------------------


def learned_kernels(
    source: Subject | nn.Module, image_size: int | tuple[int, int] | None = None
) -> dict[str, BlockKernels]:
    """The kernels of every mixer that convolves, as they are for images of this size; by default the model's own."""
    model = backbone_of(source, "kernels")
    own = source.image_size if isinstance(source, Subject) else tuple(model.config.image_size)
    grids = model.grids(*(own if image_size is None else parse_image_size(image_size)))
    found = {}
    with torch.no_grad():
        for name, mixer, stage in each_mixer(model):
            if "kernels" not in mixer.explains:
                continue
            grid = Grid(grids[stage].height, grids[stage].width)
            shown = mixer.explain(torch.empty(0), grid)  # kernels do not depend on the tokens
            causal = any(isinstance(part, ImplicitFilter) and part.causal for part in mixer.kernel_sources())
            kind = model.config.mixers[stage].name
            found[name] = BlockKernels(name, kind, grid, shown["kernels"], shown.get("window"), causal)
    if not found:
        used = sorted({choice.name for choice in model.config.mixers})
        raise ConfigError(f"{model.config.name!r} has no kernels to show: its mixers are {', '.join(used)}.")
    return found


def each_mixer(model: Backbone) -> Iterator[tuple[str, Mixer, int]]:
    """Every token mixer with its name and the number of its stage; parallel branches have a number behind the name."""
    for name, mixers in model.token_mixers.items():
        for branch, mixer in enumerate(mixers):
            yield name if len(mixers) == 1 else f"{name} ({branch})", mixer, stage_of(name)


def stage_of(name: str) -> int:
    """stages.2.blocks.0 -> 2, and coscale.blocks.0.2 -> 2."""
    parts = name.split(".")
    return int(parts[1] if parts[0] == "stages" else parts[3])


def attention_coverage(model: Backbone) -> dict[str, float]:
    """2 for every block that attends to everything, as in Figure 6."""
    return {
        name: GLOBAL
        for name, mixer, _ in each_mixer(model)
        if "attention" in mixer.explains and getattr(mixer, "window", None) is None
    }


# -- the instrument ------------------------------------------------------------------------------


def look_at_kernels(
    source: Subject, *, image_size: int | tuple[int, int] | None = None, block: str | None = None
) -> tuple[Finding, dict[str, Any]]:
    """A table of how far the kernels reach, the mean kernel of every block and their coverage as pictures.

    With `block`, the kernels of that block channel by channel as well.
    """
    found = learned_kernels(source, image_size)
    if block is not None and block not in found:
        raise ConfigError(f"{source.name!r} has no kernels at {block!r}. {near_misses(block, found)}")
    rows = [row_of(one) for one in found.values()]
    figures = {"kernels": draw_means(found), "coverage": draw_coverage(backbone_of(source, "kernels"), found)}
    pictures = [
        Picture(
            name="kernels", caption="Mean kernel of every block over its channels, each divided by its largest weight"
        ),
        Picture(name="coverage", caption="Diameter of the kernels relative to the feature map"),
    ]
    if block is not None:
        figures["channels"] = draw_channels(found[block])
        pictures.append(Picture(name="channels", caption=f"Kernels of {block}, channel by channel"))
    size = source.image_size if image_size is None else parse_image_size(image_size)
    made = finding(
        "kernels",
        f"Kernels of {source.name}",
        COLUMNS,
        rows,
        settings={"model": source.name, "image_size": list(size), "window": WINDOW, "trained": source.trained},
        pictures=tuple(pictures),
    )
    return made, figures


def row_of(one: BlockKernels) -> list[str | float]:
    grid, taps = f"{one.grid.height}x{one.grid.width}", "x".join(map(str, one.taps))
    return [one.block, one.mixer, grid, taps, one.coverage, one.reach(0.5), one.reach()]


def short(block: str) -> str:
    """stages.2.blocks.0 -> 2.0"""
    return block.replace("stages.", "").replace(".blocks.", ".")


def draw_means(found: dict[str, BlockKernels]) -> Any:
    panels = []
    for one in found.values():
        picture = one.picture(one.kernels.float().mean(0).cpu())
        values = (picture / picture.abs().max().clamp(min=1e-12)).numpy()
        panels.append(Panel(f"{short(one.block)}  {'x'.join(map(str, one.taps))}", values, "signed"))
    return draw_sheet(wrapped(panels, PANELS))


def draw_channels(one: BlockKernels) -> Any:
    panels = [
        Panel(f"channel {index}", one.picture(kernel.float().cpu()).numpy(), "signed")
        for index, kernel in enumerate(one.kernels[:CHANNELS])
    ]
    return draw_sheet(wrapped(panels, PANELS), one.block)


def draw_coverage(model: Backbone, found: dict[str, BlockKernels]) -> Any:
    """Figure 6, with the reach of the mass beside it; blocks that attend to everything are at 2."""
    attention = attention_coverage(model)
    names = [name for name, _, _ in each_mixer(model) if name in found or name in attention]
    kernels = [index for index, name in enumerate(names) if name in found]
    lines: dict[str, Any] = {
        "coverage": (kernels, [found[names[index]].coverage for index in kernels]),
        "90% of mass": (kernels, [found[names[index]].reach() for index in kernels]),
    }
    if attention:
        places = [index for index, name in enumerate(names) if name in attention]
        lines["attention"] = (places, [GLOBAL] * len(places))
    return line_chart(lines, x="block", y="diameter / feature map", ticks=[short(name) for name in names])
