"""Cascade Mask R-CNN: each stage refines the boxes of the one before and is stricter about what it calls an object."""

from dataclasses import dataclass

from torch import nn
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead

from mixlab.dense.detector import DetectorConfig
from mixlab.dense.mask_rcnn import RegionDetector
from mixlab.dense.regions import BOX_SIZE, RegionStage, overlap_loss
from mixlab.models.backbone import Backbone

CONVOLUTIONS = 4  # of a box head, in front of its linear layer
BOX_WEIGHT = 10.0


@dataclass(frozen=True)
class CascadeStep:
    """One stage of the cascade."""

    overlap: float  # with an object, from which on a proposal is its
    code_weights: tuple[float, float, float, float]
    weight: float  # of its losses


STEPS = (
    CascadeStep(0.5, (10.0, 10.0, 5.0, 5.0), 1.0),
    CascadeStep(0.6, (20.0, 20.0, 10.0, 10.0), 0.5),
    CascadeStep(0.7, (30.0, 30.0, 15.0, 15.0), 0.25),
)


class CascadeMaskRCNN(RegionDetector):
    """Three stages with heads of four convolutions, batch norms and one linear layer; their boxes learn by GIoU."""

    def __init__(self, backbone: Backbone, config: DetectorConfig) -> None:
        super().__init__(backbone, config, [build_stage(config, step) for step in STEPS])


def build_stage(config: DetectorConfig, step: CascadeStep) -> RegionStage:
    pooled = (config.width, BOX_SIZE, BOX_SIZE)
    head = FastRCNNConvFCHead(pooled, [config.width] * CONVOLUTIONS, [config.head_width], nn.BatchNorm2d)
    return RegionStage(
        config,
        head,
        box_loss=overlap_loss,
        box_weight=BOX_WEIGHT,
        overlap=step.overlap,
        code_weights=step.code_weights,
        weight=step.weight,
    )
