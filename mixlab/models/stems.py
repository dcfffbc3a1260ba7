"""Where the token grid gets coarser: the stem behind the image and the step between two stages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixlab.core.choices import Choice, Registry
from mixlab.core.errors import ConfigError, require
from mixlab.core.grid import Grid
from mixlab.core.hooks import derived
from mixlab.models.layers import Activation, ActivationChoice, activation
from mixlab.models.modules import Modules
from mixlab.ops.layers import normed, through_conv

Position = Literal["before", "after", "none"]
LARGE = 2**17  # numbers in a kernel that are worth keeping in another order


class Downsample(nn.Module):
    """A convolution with a norm over C before it, after it or not at all.

    A map (B, C, H, W) goes in, tokens and their grid come out.
    """

    def __init__(self, conv: nn.Conv2d, *, norm: Position, eps: float, norm_bias: bool, patchify: bool = False) -> None:
        super().__init__()
        width = {"before": conv.in_channels, "after": conv.out_channels, "none": 0}[norm]
        self.norm = nn.LayerNorm(width, eps=eps, bias=norm_bias) if width else None
        self.norm_first = norm == "before"
        self.conv = conv
        self.stride = conv.stride[0]
        self.patchify = patchify

    def forward(self, image_map: Tensor) -> tuple[Tensor, Grid]:
        if self.norm is not None and self.norm_first:
            image_map = normed(self.norm, image_map.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        if self.patchify:
            image_map = self.pad(image_map)
        # channels-last in, channels-last out: the tokens behind it are a view
        image_map = through_conv(self.conv, image_map.contiguous(memory_format=torch.channels_last), self.laid_out)
        grid = Grid(image_map.shape[2], image_map.shape[3])
        tokens = grid.from_map(image_map)
        if self.norm is not None and not self.norm_first:
            tokens = normed(self.norm, tokens)
        return tokens, grid

    def laid_out(self) -> Tensor:
        """The kernel; a large one in eval mode in channels-last order, into which PyTorch would bring it every time."""
        weight = self.conv.weight
        if weight.numel() < LARGE or self.training:
            return weight
        return derived(self, ("laid",), [weight], lambda: weight.contiguous(memory_format=torch.channels_last))

    def pad(self, image_map: Tensor) -> Tensor:
        """Zeros right and bottom, up to a multiple of the patch."""
        height, width = image_map.shape[2], image_map.shape[3]
        bottom, right = -height % self.stride, -width % self.stride
        return F.pad(image_map, (0, right, 0, bottom)) if bottom or right else image_map

    def pads(self, grid: Grid) -> bool:
        """Whether a map of this size does not consist of whole patches."""
        return self.patchify and bool(grid.height % self.stride or grid.width % self.stride)

    def grid_after(self, grid: Grid) -> Grid:
        """The grid behind this step, for a map of this size in front of it."""
        if self.patchify:
            return Grid(-(-grid.height // self.stride), -(-grid.width // self.stride))
        margin = 2 * int(self.conv.padding[0]) - self.conv.kernel_size[0]
        return Grid((grid.height + margin) // self.stride + 1, (grid.width + margin) // self.stride + 1)


class ConvolutionalStem(nn.Module):
    """Several small convolutions, each with a norm, and an activation between them."""

    def __init__(self, layers: Sequence[Downsample], activations: Sequence[Activation]) -> None:
        super().__init__()
        self.layers: Modules[Downsample] = Modules(layers)
        self.activations: Modules[Activation] = Modules(activations)
        self.stride = 1
        for layer in layers:
            self.stride *= layer.stride

    def forward(self, image_map: Tensor) -> tuple[Tensor, Grid]:
        *inner, last = self.layers
        for layer, act in zip(inner, self.activations, strict=True):
            tokens, grid = layer(image_map)
            image_map = grid.to_map(act(tokens))
        return last(image_map)

    def pads(self, grid: Grid) -> bool:
        return False  # the convolutions are overlapping ones

    def grid_after(self, grid: Grid) -> Grid:
        for layer in self.layers:
            grid = layer.grid_after(grid)
        return grid


Stem = Downsample | ConvolutionalStem
STEMS: Registry[Callable[..., Stem]] = Registry("stem")
StemChoice = Annotated[Choice, STEMS]


@dataclass(frozen=True)
class OverlappingOptions:
    """A kernel wider than its stride, with the authors' padding."""

    kernel: int = 3
    stride: int = 2
    padding: int = 1
    norm: Position = "before"
    eps: float = 1e-6
    norm_bias: bool = False

    def __post_init__(self) -> None:
        sizes = self.kernel >= 1 and self.stride >= 1 and 0 <= self.padding < self.kernel
        require(sizes, f"a kernel and stride of 1 or more and a padding below the kernel; got {self}.")


@STEMS.register("overlapping", OverlappingOptions)
def overlapping(in_dim: int, dim: int, options: OverlappingOptions) -> Downsample:
    conv = nn.Conv2d(in_dim, dim, options.kernel, options.stride, options.padding)
    return Downsample(conv, norm=options.norm, eps=options.eps, norm_bias=options.norm_bias)


@dataclass(frozen=True)
class PatchifyOptions:
    """Patches that do not overlap; the image is zero-padded right and bottom to whole patches."""

    patch: int = 16
    norm: Position = "none"
    eps: float = 1e-6
    norm_bias: bool = True

    def __post_init__(self) -> None:
        require(self.patch >= 1, f"a patch of 1 or more; got {self}.")


@STEMS.register("patchify", PatchifyOptions)
def patchify(in_dim: int, dim: int, options: PatchifyOptions) -> Downsample:
    conv = nn.Conv2d(in_dim, dim, options.patch, options.patch)
    return Downsample(conv, norm=options.norm, eps=options.eps, norm_bias=options.norm_bias, patchify=True)


@dataclass(frozen=True)
class ConvolutionalOptions:
    """Convolutions of stride 2: `kernels` of all, `widths` of all but the last. `activation`: the model's own."""

    widths: tuple[int, ...] = (48, 96, 192)
    kernels: tuple[int, ...] = (7, 3, 3, 3)
    eps: float = 1e-6
    norm_bias: bool = False
    activation: ActivationChoice | None = None

    def __post_init__(self) -> None:
        require(min((*self.widths, *self.kernels)) >= 1, f"widths and kernels of 1 or more; got {self}.")
        if len(self.kernels) != len(self.widths) + 1:
            raise ConfigError(
                f"A convolutional stem has one kernel more than widths (the last width is the stage's); "
                f"got kernels {self.kernels} and widths {self.widths}."
            )


@STEMS.register("convolutional", ConvolutionalOptions)
def convolutional(in_dim: int, dim: int, options: ConvolutionalOptions) -> ConvolutionalStem:
    widths = (in_dim, *options.widths, dim)
    layers = [
        Downsample(
            nn.Conv2d(before, after, kernel, stride=2, padding=kernel // 2),
            norm="after",
            eps=options.eps,
            norm_bias=options.norm_bias,
        )
        for before, after, kernel in zip(widths, widths[1:], options.kernels, strict=False)
    ]
    assert options.activation is not None, "the model's own is filled in by now"
    return ConvolutionalStem(layers, [activation(options.activation) for _ in layers[1:]])


def stem(choice: Choice, in_dim: int, dim: int) -> Stem:
    return STEMS.builder(choice)(in_dim, dim, choice.options)
