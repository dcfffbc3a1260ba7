"""What detectors by regions are made of: anchors, regions of the maps, and a stage that judges proposals.

On torchvision's parts. As there, label 0 is the background within this file, and a stage's labels count from 1.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection._utils import BoxCoder
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import batched_nms, clip_boxes_to_image, generalized_box_iou_loss, remove_small_boxes, roi_align

from mixlab.dense.detector import DetectorConfig
from mixlab.models.pyramid import STRIDES

RATIOS = (0.5, 1.0, 2.0)  # of an anchor's height to its width
FINEST = 56  # pixels: up to twice this side a region is pooled from the finest map (FPN, Eq. 1)
BOX_SIZE, MASK_SIZE = 7, 14  # cells of a pooled region
POSITIVE = 0.25  # of the sampled regions, at most
SMALLEST = 1e-2  # pixels: what is thinner is no box
SMOOTH = 1 / 9  # below this error the box loss is quadratic

BoxLoss = Callable[[BoxCoder, Tensor, Tensor, Tensor], Tensor]  # codes, proposals, truths, each (P, 4)


def exact(values: Tensor) -> Tensor:
    """Coordinates and scores are float32 at least: bf16 cannot tell neighboring pixels apart."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


class Anchors(nn.Module):
    """Boxes of three shapes around each cell of each map, whose strides are told and not guessed from its size."""

    def __init__(self, sizes: Sequence[float], strides: Sequence[int]) -> None:
        super().__init__()
        self.sizes, self.strides = tuple(sizes), tuple(strides)

    def forward(self, images: ImageList, maps: Sequence[Tensor]) -> list[Tensor]:
        levels = zip(maps, self.sizes, self.strides, strict=True)
        anchors = torch.cat([self.place(exact(level[:0]), size, stride) for level, size, stride in levels])
        return [anchors] * len(images.image_sizes)

    def place(self, level: Tensor, size: float, stride: int) -> Tensor:
        """(H * W * shapes, 4)."""
        shapes = [(size / math.sqrt(ratio) / 2, size * math.sqrt(ratio) / 2) for ratio in RATIOS]
        around = level.new_tensor([(-width, -height, width, height) for width, height in shapes])
        rows, columns = (torch.arange(side, device=level.device) * stride for side in level.shape[-2:])
        y, x = torch.meshgrid(rows, columns, indexing="ij")
        return (torch.stack([x, y, x, y], -1).view(-1, 1, 4) + around).view(-1, 4)


class ProposalHead(RPNHead):  # type: ignore[misc]
    """torchvision's, with outputs that stay exact under autocast."""

    def forward(self, maps: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        objectness, codes = super().forward(maps)
        return [exact(level) for level in objectness], [exact(level) for level in codes]


class RegionPool(nn.Module):
    """Boxes as (K, C, size, size) from the map that fits each box's size, with as many samples as it has pixels."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, maps: Mapping[str, Tensor], boxes: Sequence[Tensor]) -> Tensor:
        images = [torch.full_like(own[:, :1], index) for index, own in enumerate(boxes)]
        regions = torch.cat([torch.cat(images), torch.cat(list(boxes))], 1)
        sides = ((regions[:, 3] - regions[:, 1]) * (regions[:, 4] - regions[:, 2])).sqrt()
        levels = torch.log2(sides / FINEST + 1e-6).floor().clamp(0, len(STRIDES) - 1)
        places, pooled = [], []
        for index, (level, stride) in enumerate(zip(maps.values(), STRIDES, strict=False)):  # all but the coarsest
            places.append((levels == index).nonzero()[:, 0])
            level = exact(level)  # coordinates in half precision would be pixels off
            pooled.append(roi_align(level, regions[places[-1]].to(level.dtype), self.size, 1 / stride, 0, aligned=True))
        return torch.cat(pooled)[torch.cat(places).argsort()]


class BoxPredictor(nn.Module):
    """Scores (N, 1 + classes) and box codes (N, classes, 4); one code for all classes if it is agnostic of them."""

    def __init__(self, width: int, num_classes: int, *, class_agnostic: bool) -> None:
        super().__init__()
        self.classifier = nn.Linear(width, 1 + num_classes)
        self.regressor = nn.Linear(width, 4 * (1 if class_agnostic else num_classes))
        for layer, std in ((self.classifier, 0.01), (self.regressor, 0.001)):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        return exact(self.classifier(features)), exact(self.regressor(features)).unflatten(1, (-1, 4))


def smooth_loss(coder: BoxCoder, codes: Tensor, proposals: Tensor, truths: Tensor) -> Tensor:
    """Of the codes, summed."""
    return F.smooth_l1_loss(codes, coder.encode_single(truths, proposals), beta=SMOOTH, reduction="sum")


def overlap_loss(coder: BoxCoder, codes: Tensor, proposals: Tensor, truths: Tensor) -> Tensor:
    """1 - GIoU of the decoded boxes, summed."""
    return generalized_box_iou_loss(coder.decode_single(codes, proposals), truths, reduction="sum")


class RegionStage(RoIHeads):  # type: ignore[misc]
    """Judges proposals: matches them to objects for training, classifies and refines them, and draws masks in them.

    A proposal is an object's if they overlap by `overlap`; `code_weights` scale the codes of boxes.
    """

    def __init__(
        self,
        config: DetectorConfig,
        box_head: nn.Module,
        *,
        box_loss: BoxLoss = smooth_loss,
        box_weight: float = 1.0,
        overlap: float = 0.5,
        code_weights: tuple[float, float, float, float] = (10.0, 10.0, 5.0, 5.0),
        weight: float = 1.0,
    ) -> None:
        predictor = BoxPredictor(config.head_width, config.num_classes, class_agnostic=config.class_agnostic)
        width, masks = config.width, config.masks
        super().__init__(
            RegionPool(BOX_SIZE),
            box_head,
            predictor,
            *(overlap, overlap, config.region_samples, POSITIVE, code_weights),
            *(config.score_threshold, config.nms, config.detections),
            mask_roi_pool=RegionPool(MASK_SIZE) if masks else None,
            mask_head=MaskRCNNHeads(width, (width,) * 4, 1) if masks else None,
            mask_predictor=MaskRCNNPredictor(width, width, config.num_classes) if masks else None,
        )
        self.box_loss, self.box_weight, self.weight = box_loss, box_weight, weight

    def judge(self, maps: Mapping[str, Tensor], proposals: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Scores (N, 1 + classes) and codes (N, classes, 4) of the proposals of all images, one after the other."""
        return self.box_predictor(self.box_head(self.box_roi_pool(maps, proposals)))

    def draw(self, maps: Mapping[str, Tensor], boxes: Sequence[Tensor], classes: Tensor) -> Tensor:
        """The mask scores (N, 28, 28) of each box for its class, counted from 0."""
        scores = self.mask_predictor(self.mask_head(self.mask_roi_pool(maps, boxes)))
        return exact(scores)[torch.arange(len(scores), device=scores.device), classes]

    def refine(
        self, codes: Tensor, proposals: Sequence[Tensor], classes: Tensor, sizes: Sequence[tuple[int, int]]
    ) -> list[Tensor]:
        """The boxes of these classes as the next stage's proposals. Gradients end here."""
        refined = self.box_coder.decode_single(of_class(codes.detach(), classes), torch.cat(list(proposals)))
        refined = refined.nan_to_num()  # the loss says what is wrong; boxes go on
        parts = refined.split([len(own) for own in proposals])
        return [clip_boxes_to_image(part, size) for part, size in zip(parts, sizes, strict=True)]

    def learn(
        self,
        maps: Mapping[str, Tensor],
        proposals: list[Tensor],
        sizes: Sequence[tuple[int, int]],
        targets: list[dict[str, Tensor]],
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """The weighted losses by name, and the sampled proposals refined."""
        with torch.no_grad():
            proposals, matched, labels, _ = self.select_training_samples(proposals, targets)
        scores, codes = self.judge(maps, proposals)
        label = torch.cat(labels)
        positive = [own > 0 for own in labels]
        objects = [own[keep] for own, keep in zip(matched, positive, strict=True)]
        regions = [own[keep] for own, keep in zip(proposals, positive, strict=True)]
        classes = label[label > 0] - 1
        truths = torch.cat([target["boxes"][own] for target, own in zip(targets, objects, strict=True)])
        box_loss = self.box_loss(self.box_coder, of_class(codes[label > 0], classes), torch.cat(regions), truths)
        losses = {
            "class_loss": F.cross_entropy(scores, label),
            "box_loss": self.box_weight * box_loss / max(len(label), 1),
        }
        if self.has_mask():
            drawn = self.draw(maps, regions, classes)
            losses["mask_loss"] = mask_loss(drawn, regions, [target["masks"] for target in targets], objects)
        likely = torch.where(label > 0, label, scores[:, 1:].argmax(1) + 1) - 1
        weighted = {name: self.weight * loss for name, loss in losses.items()}
        refined = self.refine(codes, proposals, likely, sizes)
        return weighted, [boxes[remove_small_boxes(boxes, SMALLEST)] for boxes in refined]

    def select(self, scores: Tensor, codes: Tensor, proposals: Tensor, size: tuple[int, int]) -> dict[str, Tensor]:
        """The detections of one image from the probabilities of its proposals, best first; labels count from 0."""
        count, classes = len(scores), scores.shape[1] - 1
        spread = proposals[:, None].expand(-1, classes, -1).reshape(-1, 4)
        boxes = self.box_coder.decode_single(codes.expand(count, classes, 4).reshape(-1, 4), spread)
        boxes, scores = clip_boxes_to_image(boxes, size), scores[:, 1:].flatten()
        labels = torch.arange(classes, device=scores.device).repeat(count)
        keep = (scores > self.score_thresh).nonzero()[:, 0]
        keep = keep[remove_small_boxes(boxes[keep], SMALLEST)]
        keep = keep[batched_nms(boxes[keep], scores[keep], labels[keep], self.nms_thresh)]
        keep = keep[: self.detections_per_img]
        return {"boxes": boxes[keep], "scores": scores[keep], "labels": labels[keep]}


def of_class(codes: Tensor, classes: Tensor) -> Tensor:
    """The codes (N, 4) for one class each; there may be one code for all."""
    if codes.shape[1] == 1:
        return codes[:, 0]
    return codes[torch.arange(len(codes), device=codes.device), classes]


def mask_loss(drawn: Tensor, regions: Sequence[Tensor], masks: Sequence[Tensor], objects: Sequence[Tensor]) -> Tensor:
    """Cross-entropy per cell between drawn masks and the objects' masks within the regions; 0 if there are none."""
    truths = []
    for region, mask, own in zip(regions, masks, objects, strict=True):
        if len(own):
            places = torch.cat([own[:, None].to(region), region], 1)
            truths.append(roi_align(mask[:, None].to(region), places, drawn.shape[-1], aligned=True)[:, 0] >= 0.5)
    return F.binary_cross_entropy_with_logits(drawn, torch.cat(truths).to(drawn)) if truths else drawn.sum() * 0


def paste_masks(probabilities: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Masks (N, H, W) of an image of this size from the probabilities (N, M, M) within boxes."""
    pasted = torch.zeros(len(boxes), *size, dtype=torch.bool, device=boxes.device)
    for index, (left, top, right, bottom) in enumerate(boxes.tolist()):
        spans = [(left, right, size[1]), (top, bottom, size[0])]
        limits = [(max(int(start), 0), min(math.ceil(end), side)) for start, end, side in spans]
        x, y = (
            (torch.arange(*limit, device=boxes.device) + 0.5 - start) / (end - start) * 2 - 1
            for limit, (start, end, _) in zip(limits, spans, strict=True)
        )
        grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)[None]
        values = F.grid_sample(probabilities[index, None, None], grid, padding_mode="border", align_corners=False)
        pasted[index, limits[1][0] : limits[1][1], limits[0][0] : limits[0][1]] = values[0, 0] > 0.5
    return pasted
