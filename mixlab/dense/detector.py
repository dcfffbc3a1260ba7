"""Detectors on a backbone: what describes one, and how it is built."""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, Self

from mixlab.core.choices import make, plain
from mixlab.core.errors import require
from mixlab.dense.backbones import backbone_for
from mixlab.models.backbone import Backbone
from mixlab.models.dense_model import DenseModel
from mixlab.models.zoo import detection_options

Kind = Literal["mask_rcnn", "cascade_mask_rcnn", "deformable_detr"]
LEVELS = 5  # maps that have anchors: strides 4 to 64


@dataclass(frozen=True, kw_only=True)
class DeformableOptions:
    """What only Deformable DETR has; the defaults are the authors' and CoaT's.

    `multi_scale` reads maps at strides 8, 16, 32 and 64, else only the one at stride 32. `box_refine` lets every
    decoder layer correct the boxes of the one before; `two_stage` also takes the first boxes from the encoder, at as
    many of its best positions as there are queries, so images must have that many.
    """

    encoder_layers: int = 6
    decoder_layers: int = 6
    feedforward: int = 1024
    heads: int = 8
    points: int = 4
    dropout: float = 0.1
    multi_scale: bool = True
    box_refine: bool = False
    two_stage: bool = False

    def __post_init__(self) -> None:
        counts = (self.encoder_layers, self.decoder_layers, self.feedforward, self.heads, self.points)
        require(min(counts) >= 1, f"layers, feedforward, heads and points of 1 or more; got {self}.")
        require(0 <= self.dropout < 1, f"a dropout in [0, 1); got {self.dropout}.")
        require(self.box_refine or not self.two_stage, "box_refine = true for two_stage: it refines the first boxes.")


@dataclass(frozen=True, kw_only=True)
class DetectorConfig:
    """Everything about a detector but its backbone. Sizes are those with which the papers' detectors were built.

    `masks`: whether there are mask heads, which need masks to train. `norms` puts a layer norm on each map of the
    backbone (HyenaPixel, section 4.3); `learned_maps` is by default on where all of them have one stride.
    `anchor_scale` is for images much smaller than 800 px. `nms` is the overlap above which the weaker of two boxes of a
    class goes. Deformable DETR has `queries`, and no masks, anchors or regions.
    """

    kind: Kind = "mask_rcnn"
    num_classes: int = 80  # COCO's
    masks: bool = True
    norms: bool = False
    learned_maps: bool | None = None
    width: int = 256
    head_width: int = 1024
    class_agnostic: bool = False  # one refinement of a box for all classes
    anchor_sizes: tuple[float, ...] = (32.0, 64.0, 128.0, 256.0, 512.0)
    anchor_scale: float = 1.0
    anchor_samples: int = 256  # per image in training
    region_samples: int = 512
    proposals: int = 1000  # per image
    queries: int = 300
    score_threshold: float = 0.05
    nms: float = 0.5
    detections: int = 100  # per image, at most
    shorter: int = 800  # side of images in evaluation; in the image's own proportions
    longer: int = 1333  # at most
    deformable: DeformableOptions = DeformableOptions()

    def __post_init__(self) -> None:
        counts = ("num_classes", "width", "head_width", "anchor_samples", "region_samples", "proposals", "queries")
        for name in (*counts, "detections", "shorter", "longer"):
            require(getattr(self, name) >= 1, f"{name} of 1 or more; got {getattr(self, name)}.")
        require(len(self.anchor_sizes) == LEVELS, f"{LEVELS} anchor_sizes, one per map; got {list(self.anchor_sizes)}.")
        require(
            min(self.anchor_sizes) > 0 and self.anchor_scale > 0,
            f"anchor_sizes and an anchor_scale above 0; got {list(self.anchor_sizes)} and {self.anchor_scale}.",
        )
        require(
            0 <= self.score_threshold < 1 and 0 <= self.nms <= 1,
            f"a score_threshold in [0, 1) and nms in [0, 1]; got {self.score_threshold} and {self.nms}.",
        )

    @classmethod
    def parse(cls, row: Mapping[str, Any]) -> Self:
        return make(cls, row, "the detector")

    def plain(self) -> dict[str, Any]:
        """JSON-ready data that `parse` turns back into this config."""
        return plain(self)


def create_detector(
    backbone: str | Backbone,
    kind: Kind = "mask_rcnn",
    *,
    num_classes: int,
    weights: str | PathLike[str] | None = None,
    backbone_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> DenseModel:
    """A detector on a named backbone, or on one that is there already (it becomes part of the detector).

    `num_classes` does not count the background. `weights` is a file for the backbone, such as one trained to classify.
    `backbone_options` go to `create_model`, `options` are fields of `DetectorConfig`. A named backbone is built as its
    paper builds it for detection: attention of CAFormer is in sliding windows unless `backbone_options` has `mixers`.
    """
    config = DetectorConfig.parse({"num_classes": num_classes, "kind": kind, **options})
    usual = detection_options(backbone) if isinstance(backbone, str) else None
    own = backbone_for("detector", backbone, backbone_options, weights, usual=usual)
    return build_detector(own, config)


def build_detector(backbone: Backbone, config: DetectorConfig) -> DenseModel:
    """The detector that a config describes. What it is made of is imported only here: it takes seconds."""
    if config.kind == "deformable_detr":
        from mixlab.dense.deformable_detr import DeformableDetector

        return DeformableDetector(backbone, config)
    if config.kind == "cascade_mask_rcnn":
        from mixlab.dense.cascade import CascadeMaskRCNN

        return CascadeMaskRCNN(backbone, config)
    from mixlab.dense.mask_rcnn import MaskRCNN

    return MaskRCNN(backbone, config)
