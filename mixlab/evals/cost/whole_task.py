"""Whole segmenters and detectors whose cost is measured, named like "upernet:convformer_s18"."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from mixlab.core.errors import ConfigError, near_misses
from mixlab.dense.detector import create_detector
from mixlab.dense.segmenter import create_segmenter
from mixlab.dense.timm_maps import is_timm
from mixlab.models.zoo import list_models

DECODERS = ("upernet", "linear")
DETECTORS = ("mask_rcnn", "cascade_mask_rcnn", "deformable_detr")
CLASSES = {"segmenter": 150, "detector": 80}  # ADE20K's and COCO's


def is_whole_task(text: str) -> bool:
    return text.partition(":")[0] in (*DECODERS, *DETECTORS)


def check_whole_task(text: str) -> tuple[str, str]:
    """The head and the backbone, or an error."""
    head, _, name = text.partition(":")
    if not is_timm(name) and name not in list_models():
        raise ConfigError(f"{text!r} names no backbone behind the colon. {near_misses(name, list_models())}")
    return head, name


def whole_task(text: str, image_size: tuple[int, int], changes: Mapping[str, Any] | None = None) -> nn.Module:
    """The model for one or more images of this size, with fresh weights. A detector does not resize them.

    `changes` are options of the backbone.
    """
    head, name = check_whole_task(text)
    backbone: Any = {"backbone_options": changes}
    if head in DECODERS:
        return create_segmenter(name, head, num_classes=CLASSES["segmenter"], **backbone).eval()  # type: ignore[arg-type]
    sides = {"shorter": min(image_size), "longer": max(image_size)}
    return TakesBatches(create_detector(name, head, num_classes=CLASSES["detector"], **sides, **backbone)).eval()  # type: ignore[arg-type]


class TakesBatches(nn.Module):
    """A detector, which takes a list of images, for a batch of them."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, images: Tensor) -> object:
        return self.detector(images if images.is_meta else list(images))  # without data it is counted
