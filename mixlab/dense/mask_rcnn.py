"""Mask R-CNN with a feature pyramid, on any backbone: images, maps, proposals, then stages that judge them."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool

from mixlab.dense.base import prepare
from mixlab.dense.detector import DetectorConfig
from mixlab.dense.regions import BOX_SIZE, MASK_SIZE, RATIOS, Anchors, ProposalHead, RegionStage, paste_masks
from mixlab.dense.targets import as_batch, check_targets
from mixlab.dense.torchvision_ops import supply_operators
from mixlab.dense.upernet import MapNorms
from mixlab.models.backbone import Backbone
from mixlab.models.dense_model import DenseModel
from mixlab.models.modules import Modules
from mixlab.models.pyramid import STRIDES, PyramidAdapter

supply_operators()

Maps = Mapping[str, Tensor]
Sizes = Sequence[tuple[int, int]]
CANDIDATES = {"training": 2, "testing": 1}  # anchors per map in front of the suppression, per proposal behind it
LOSSES = {"loss_objectness": "objectness_loss", "loss_rpn_box_reg": "proposal_loss"}


class RegionDetector(DenseModel):
    """A detector whose stages judge proposals one after the other. Build one with `mixlab.create_detector`.

    The backbone loses its classifier; its final norm, which no map passes, is kept but not trained.
    """

    task = "detection"
    config: DetectorConfig
    backbone_path = "maps.backbone."

    def __init__(self, backbone: Backbone, config: DetectorConfig, stages: Iterable[RegionStage]) -> None:
        super().__init__()
        self.config = config
        learned = prepare(backbone, config.learned_maps)
        self.maps = PyramidAdapter(backbone, learned=learned)
        self.norms = MapNorms(self.maps.channels) if config.norms else None
        self.pyramid = FeaturePyramidNetwork(list(self.maps.channels), config.width, LastLevelMaxPool())
        self.proposals = build_proposals(config)
        self.stages: Modules[RegionStage] = Modules(stages)

    def forward(
        self, images: Sequence[Tensor] | Tensor, targets: Sequence[Mapping[str, Tensor]] | None = None
    ) -> list[dict[str, Tensor]] | dict[str, Tensor]:
        """Detections of normalized images (C, H, W) of any sizes; with targets, the losses by name.

        A detection has boxes (N, 4) in pixels, scores (N,), labels (N,) counted from 0, and masks (N, H, W) if the
        detector has mask heads. Losses are weighted: their sum is what is trained. Without data (on the meta device)
        there is nothing to find, and as much is computed as papers count: 1,000 proposals, `detections` masks.
        """
        batch, sizes = as_batch(images)
        if targets is not None:
            checked = check_targets(targets, sizes, self.config)
        maps = self.feature_maps(batch)
        if batch.is_meta:
            return self.compute_anything(maps, len(sizes))
        # The proposals' own switch between training and testing; the layers inside follow the model's mode.
        self.proposals.training = targets is not None
        padded = ImageList(batch, list(sizes))
        if targets is None:
            return self.detect(maps, self.proposals(padded, maps)[0], sizes)
        proposals, found = self.proposals(padded, maps, checked)
        return {LOSSES[name]: loss for name, loss in found.items()} | self.learn(maps, proposals, sizes, checked)

    def feature_maps(self, batch: Tensor) -> Maps:
        maps = self.maps(batch)
        if self.norms is not None:
            maps = self.norms(maps)
        return self.pyramid(OrderedDict((str(index), level) for index, level in enumerate(maps)))

    def learn(
        self, maps: Maps, proposals: list[Tensor], sizes: Sizes, targets: list[dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        losses = {}
        for index, stage in enumerate(self.stages, 1):
            own, proposals = stage.learn(maps, proposals, sizes, targets)
            suffix = f"_{index}" if len(self.stages) > 1 else ""
            losses.update({f"{name}{suffix}": loss for name, loss in own.items()})
        return losses

    def detect(self, maps: Maps, proposals: list[Tensor], sizes: Sizes) -> list[dict[str, Tensor]]:
        """The boxes of the last stage, with probabilities and masks averaged over all stages."""
        chances = []
        for index, stage in enumerate(self.stages):
            scores, codes = stage.judge(maps, proposals)
            chances.append(scores.softmax(1))
            if index + 1 < len(self.stages):
                proposals = stage.refine(codes, proposals, scores[:, 1:].argmax(1), sizes)
        counts = [len(own) for own in proposals]
        parts = zip(torch.stack(chances).mean(0).split(counts), codes.split(counts), proposals, sizes, strict=True)
        found = [self.stages[-1].select(*part) for part in parts]
        if self.config.masks:
            boxes, labels = [own["boxes"] for own in found], torch.cat([own["labels"] for own in found])
            drawn = torch.stack([stage.draw(maps, boxes, labels).sigmoid() for stage in self.stages]).mean(0)
            for own, masks, size in zip(found, drawn.split([len(own) for own in boxes]), sizes, strict=True):
                own["masks"] = paste_masks(masks, own["boxes"], size)
        return found

    def compute_anything(self, maps: Maps, images: int) -> list[dict[str, Tensor]]:
        """What runs whatever is found, for as many proposals and detections as the config admits."""
        levels = list(maps.values())
        self.proposals.head(levels)
        width, masks = levels[0].shape[1], images * self.config.detections
        for stage in self.stages:
            pooled = levels[0].new_empty(images * self.config.proposals, width, BOX_SIZE, BOX_SIZE)
            stage.box_predictor(stage.box_head(pooled))
            if self.config.masks:
                stage.mask_predictor(stage.mask_head(levels[0].new_empty(masks, width, MASK_SIZE, MASK_SIZE)))
        return []


def build_proposals(config: DetectorConfig) -> RegionProposalNetwork:
    sizes = [size * config.anchor_scale for size in config.anchor_sizes]
    return RegionProposalNetwork(
        Anchors(sizes, (*STRIDES, 2 * STRIDES[-1])),
        ProposalHead(config.width, len(RATIOS)),
        fg_iou_thresh=0.7,
        bg_iou_thresh=0.3,
        batch_size_per_image=config.anchor_samples,
        positive_fraction=0.5,
        pre_nms_top_n={mode: times * config.proposals for mode, times in CANDIDATES.items()},
        post_nms_top_n=dict.fromkeys(CANDIDATES, config.proposals),
        nms_thresh=0.7,
    )


class MaskRCNN(RegionDetector):
    """One stage with a head of two linear layers."""

    def __init__(self, backbone: Backbone, config: DetectorConfig) -> None:
        head: nn.Module = TwoMLPHead(config.width * BOX_SIZE**2, config.head_width)
        super().__init__(backbone, config, [RegionStage(config, head)])
