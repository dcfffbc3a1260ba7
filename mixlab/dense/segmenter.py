"""Segmentation models: a backbone's maps, a decoder, a class for every pixel."""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixlab.core.choices import make, plain
from mixlab.core.errors import DataError, require
from mixlab.data.dense import IGNORE
from mixlab.dense.backbones import backbone_for
from mixlab.dense.base import prepare
from mixlab.dense.upernet import ConvNorm, LinearDecoder, MapNorms, PixelClassifier, UperNet, enlarge
from mixlab.models.backbone import Backbone
from mixlab.models.dense_model import DenseModel
from mixlab.models.pyramid import PyramidAdapter

LOSS, AUXILIARY_LOSS = "loss", "auxiliary_loss"


@dataclass(frozen=True, kw_only=True)
class SegmenterConfig:
    """Everything about a segmenter but its backbone. Sizes are those of MetaFormer's and HyenaPixel's UperNet.

    `linear` reads the last map as the backbone gives it; `upernet` reads maps at strides 4, 8, 16 and 32, which are
    learned (`learned_maps`) where all maps of the backbone have one stride; `norms` puts a layer norm on each. An
    auxiliary head on map number `auxiliary_map` is trained along unless its weight is 0. In the losses a class that
    fills n pixels of a batch counts n^-balance per pixel: 0 as they are, 1 as much as any other class; predictions
    are brought back to how often the classes were seen in training. `image_size` is the crop in training: at prediction
    the shorter side of images and the window by default. `mode`, `stride` (two thirds of the window unless given),
    `scales` and `flip` say how images are predicted by default.
    """

    num_classes: int
    decoder: Literal["upernet", "linear"] = "upernet"
    width: int = 512
    auxiliary_weight: float = 0.4
    auxiliary_width: int = 256
    auxiliary_map: int = 2
    norms: bool = False
    learned_maps: bool | None = None
    dropout: float = 0.1
    image_size: int = 512
    balance: float = 0.0
    mode: Literal["whole", "sliding", "multiscale"] = "whole"
    stride: int | None = None
    scales: tuple[float, ...] = (0.75, 1.0, 1.25, 1.5, 1.75)
    flip: bool = True

    def __post_init__(self) -> None:
        require(1 < self.num_classes <= IGNORE, f"2 to {IGNORE} classes for segmentation; got {self.num_classes}.")
        widths = (self.width, self.auxiliary_width, self.image_size)
        require(min(widths) >= 1, f"a width, auxiliary_width and image_size of 1 or more; got {widths}.")
        require(self.auxiliary_weight >= 0, f"an auxiliary_weight of 0 or more; got {self.auxiliary_weight}.")
        require(0 <= self.balance <= 1, f"a balance of the classes from 0 to 1; got {self.balance}.")
        require(0 <= self.dropout < 1, f"a dropout in [0, 1); got {self.dropout}.")
        require(not self.norms or self.decoder != "linear", "no norms for the linear decoder: it has its own.")

    @classmethod
    def parse(cls, row: Mapping[str, Any]) -> Self:
        return make(cls, row, "the segmenter")

    def plain(self) -> dict[str, Any]:
        """JSON-ready data that `parse` turns back into this config."""
        return plain(self)


class NativeMaps(nn.Module):
    """The backbone's maps as it gives them, in the form of a `PyramidAdapter`."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone
        self.strides, self.channels = backbone.strides, backbone.channels

    def forward(self, image: Tensor) -> list[Tensor]:
        return self.backbone.pyramid(image)


class AuxiliaryHead(nn.Module):
    """Scores from one map alone: a shorter way for gradients into the backbone, used in training only."""

    def __init__(self, channels: int, stride: int, config: SegmenterConfig) -> None:
        super().__init__()
        self.stride = stride
        self.conv = ConvNorm(channels, config.auxiliary_width, 3)
        self.classifier = PixelClassifier(config.auxiliary_width, config.num_classes, config.dropout)

    def forward(self, level: Tensor, height: int, width: int) -> Tensor:
        return enlarge(self.classifier(self.conv(level)), self.stride, height, width)


class Segmenter(DenseModel):
    """A class for every pixel. Build one with `mixlab.create_segmenter`.

    The backbone loses its classifier; its final norm, which no map passes, is kept but not trained.
    """

    task = "segmentation"
    config: SegmenterConfig
    seen: Tensor | None  # pixels of each class in training, where classes are balanced
    backbone_path = "maps.backbone."

    def __init__(self, backbone: Backbone, config: SegmenterConfig) -> None:
        super().__init__()
        self.config = config
        learned = prepare(backbone, config.learned_maps)
        linear = config.decoder == "linear"
        self.maps = NativeMaps(backbone) if linear else PyramidAdapter(backbone, learned=learned)
        channels, strides = self.maps.channels, self.maps.strides
        self.norms = MapNorms(channels) if config.norms else None
        self.decoder = LinearDecoder(channels, strides) if linear else UperNet(channels, strides, config.width)
        self.classifier = PixelClassifier(self.decoder.width, config.num_classes, config.dropout)
        self.auxiliary = self.build_auxiliary(config) if config.auxiliary_weight else None
        self.register_buffer("seen", torch.zeros(config.num_classes) if config.balance else None)

    def build_auxiliary(self, config: SegmenterConfig) -> AuxiliaryHead:
        place, channels = config.auxiliary_map, self.maps.channels
        require(0 <= place < len(channels), f"an auxiliary_map from 0 to {len(channels) - 1}; got {place}.")
        return AuxiliaryHead(channels[place], self.maps.strides[place], config)

    def forward(self, images: Tensor, masks: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        """Scores (B, classes, H, W) of normalized images (B, C, H, W); with masks (B, H, W), the losses by name.

        Where a mask is 255 nothing is learned. Losses are weighted: their sum is what is trained.
        """
        height, width = images.shape[-2:]
        maps = self.maps(images)
        if self.norms is not None:
            maps = self.norms(maps)
        scores = enlarge(self.classifier(self.decoder(maps)), self.decoder.stride, height, width)
        if masks is None:
            return scores if self.seen is None else scores + self.shift(self.seen).to(scores.dtype)
        check_masks(images, masks)
        if self.seen is not None and self.training:
            self.seen += class_counts(masks, self.config.num_classes)
        losses = {LOSS: pixel_loss(scores, masks, self.config.balance)}
        if self.auxiliary is not None and self.training:
            shallow = self.auxiliary(maps[self.config.auxiliary_map], height, width)
            weight = self.config.auxiliary_weight
            losses[AUXILIARY_LOSS] = weight * pixel_loss(shallow, masks, self.config.balance)
        return losses

    def shift(self, seen: Tensor) -> Tensor:
        """What turns scores of balanced classes into scores of classes as frequent as they are, (classes, 1, 1).

        With a weight n^-b on every pixel of a class, the scores learn p(class) n^-b: b log n is missing.
        """
        return self.config.balance * seen.clamp(min=1).log()[:, None, None]


def check_masks(images: Tensor, masks: Tensor) -> None:
    expected = (len(images), *images.shape[2:])
    if tuple(masks.shape) != expected or masks.is_floating_point():
        raise DataError(
            f"Masks for these images are whole numbers of shape {expected}; got {masks.dtype} of {tuple(masks.shape)}."
        )


def pixel_loss(scores: Tensor, masks: Tensor, balance: float = 0.0) -> Tensor:
    """Cross-entropy per pixel that belongs to a class; 0 if there is none."""
    masks, known = masks.long(), masks != IGNORE
    if not balance:
        total = F.cross_entropy(scores.float(), masks, ignore_index=IGNORE, reduction="sum")
        return total / known.sum().clamp(min=1)
    counts = class_counts(masks, scores.shape[1])
    weights = counts.clamp(min=1).to(torch.float32) ** -balance
    total = F.cross_entropy(scores.float(), masks, weights, ignore_index=IGNORE, reduction="sum")
    return total / (weights * counts).sum().clamp(min=torch.finfo(torch.float32).tiny)


def class_counts(masks: Tensor, classes: int) -> Tensor:
    """Pixels of each class, (classes,)."""
    return torch.bincount(masks[masks != IGNORE].long(), minlength=classes)


def create_segmenter(
    backbone: str | Backbone,
    decoder: Literal["upernet", "linear"] = "upernet",
    *,
    num_classes: int,
    weights: str | PathLike[str] | None = None,
    backbone_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Segmenter:
    """A segmenter on a named backbone, or on one that is there already (it becomes part of the segmenter).

    `weights` is a file for the backbone, such as one trained to classify. `backbone_options` go to `create_model`,
    `options` are fields of `SegmenterConfig`.
    """
    config = SegmenterConfig.parse({"num_classes": num_classes, "decoder": decoder, **options})
    own = backbone_for("segmenter", backbone, backbone_options, weights)
    return Segmenter(own, config)
