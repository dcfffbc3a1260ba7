"""Decoders for segmentation: from a backbone's maps to a score per class and cell of the finest map they read.

UperNet follows Xiao et al. (2018) with the sizes that the papers' framework gives it. transformers has the same head
(a test compares them); this one needs neither that library nor its config of a backbone, keeps pixels where they are
at sides that are no multiple of 32, and trains on single images.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixlab.models.modules import Modules

POOLED = (1, 2, 3, 6)  # cells per side that the coarsest map is averaged to
CLASSIFIER_STD = 0.01


class BatchNorm(nn.BatchNorm2d):
    """Batch norm; a single value per channel has no variance, there the running statistics serve in training too."""

    def forward(self, values: Tensor) -> Tensor:
        if self.training and values.numel() == self.num_features:
            return F.batch_norm(values, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(values)


class ConvNorm(nn.Sequential):
    """Convolution, batch norm, ReLU."""

    def __init__(self, channels: int, width: int, kernel: int) -> None:
        conv = nn.Conv2d(channels, width, kernel, padding=kernel // 2, bias=False)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        super().__init__(conv, BatchNorm(width), nn.ReLU(inplace=True))


class PixelClassifier(nn.Sequential):
    """Dropout of whole channels, then a score per class and cell."""

    def __init__(self, channels: int, num_classes: int, dropout: float) -> None:
        scores = nn.Conv2d(channels, num_classes, 1)
        nn.init.normal_(scores.weight, std=CLASSIFIER_STD)
        nn.init.zeros_(scores.bias)  # type: ignore[arg-type]
        super().__init__(nn.Dropout2d(dropout), scores)


class PyramidPooling(nn.Module):
    """The coarsest map beside its own averages over 1, 4, 9 and 36 parts of the image."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.parts: Modules[ConvNorm] = Modules(ConvNorm(channels, width, 1) for _ in POOLED)
        self.fuse = ConvNorm(channels + len(POOLED) * width, width, 3)

    def forward(self, level: Tensor) -> Tensor:
        beside = [level]
        for cells, part in zip(POOLED, self.parts, strict=True):
            pooled = part(F.adaptive_avg_pool2d(level, cells))
            beside.append(F.interpolate(pooled, level.shape[2:], mode="bilinear"))
        return self.fuse(torch.cat(beside, 1))


class UperNet(nn.Module):
    """Pyramid pooling on the coarsest map, a feature pyramid from there to the finest, all levels fused there."""

    def __init__(self, channels: Sequence[int], strides: Sequence[int], width: int) -> None:
        super().__init__()
        self.strides = tuple(strides)
        self.stride, self.width = self.strides[0], width  # of the map that comes out
        self.pooling = PyramidPooling(channels[-1], width)
        self.lateral: Modules[ConvNorm] = Modules(ConvNorm(channel, width, 1) for channel in channels[:-1])
        self.smooth: Modules[ConvNorm] = Modules(ConvNorm(width, width, 3) for _ in channels[:-1])
        self.fuse = ConvNorm(len(channels) * width, width, 3)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Maps from fine to coarse to one of `width` channels at the stride of the finest."""
        levels = [self.pooling(maps[-1])]
        for index in reversed(range(len(self.lateral))):
            lateral = self.lateral[index](maps[index])
            factor = self.strides[index + 1] // self.strides[index]
            levels.insert(0, lateral + enlarge(levels[0], factor, *lateral.shape[2:]))
        smoothed = [smooth(level) for smooth, level in zip(self.smooth, levels[:-1], strict=True)]
        size, levels = levels[0].shape[2:], [*smoothed, levels[-1]]
        fused = [
            enlarge(level, stride // self.stride, *size) for level, stride in zip(levels, self.strides, strict=True)
        ]
        return self.fuse(torch.cat(fused, 1))


class LinearDecoder(nn.Module):
    """The backbone's last map behind a batch norm: with a classifier on it, a linear head."""

    def __init__(self, channels: Sequence[int], strides: Sequence[int]) -> None:
        super().__init__()
        self.stride, self.width = strides[-1], channels[-1]
        self.norm = BatchNorm(channels[-1])

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        return self.norm(maps[-1])


class MapNorms(nn.Module):
    """A layer norm over the channels of each map (HyenaPixel, section 4.3)."""

    def __init__(self, channels: Sequence[int], eps: float = 1e-6) -> None:
        super().__init__()
        self.norms: Modules[nn.LayerNorm] = Modules(nn.LayerNorm(channel, eps=eps) for channel in channels)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(self.norms, maps, strict=True)
        return [norm(level.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) for norm, level in pairs]


def enlarge(values: Tensor, factor: int, height: int, width: int) -> Tensor:
    """A map with `factor` times the cells per side, cut or continued right and bottom to height x width cells.

    A pixel stays where it is: a map whose last cells reach beyond the image is not squeezed into it.
    """
    wanted = (-(-height // factor), -(-width // factor))
    bottom, right = (max(0, want - have) for want, have in zip(wanted, values.shape[2:], strict=True))
    if bottom or right:
        values = F.pad(values, (0, right, 0, bottom), mode="replicate")
    if factor > 1:
        values = F.interpolate(values, scale_factor=factor, mode="bilinear")
    return values[:, :, :height, :width]
