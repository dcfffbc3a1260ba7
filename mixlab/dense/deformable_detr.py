"""Deformable DETR (Zhu et al., 2021): object queries that look at a few points of the maps, matched one to one.

The encoder and decoder, the matching and the losses are those of transformers, whose deformable attention runs in
plain PyTorch. Initial values, loss weights and the heads follow the authors' release: transformers ties the heads of
refined boxes, starts every class at a score of one half and leaves the first of two stages untrained.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixlab.core.errors import ConfigError, ImageError
from mixlab.dense.base import prepare
from mixlab.dense.detector import DeformableOptions, DetectorConfig
from mixlab.dense.matching import Layer, Target, set_losses
from mixlab.dense.targets import as_batch, check_targets
from mixlab.dense.upernet import MapNorms
from mixlab.models.backbone import Backbone
from mixlab.models.dense_model import DenseModel
from mixlab.models.modules import Modules
from mixlab.models.pyramid import STRIDES, PyramidAdapter

if TYPE_CHECKING:
    from transformers import DeformableDetrModel, PreTrainedConfig

GROUPS = 32  # of the group norm behind each map's projection
PRIOR = 0.01  # every class's score in the beginning


class CoarseMaps(PyramidAdapter):
    """The adapter's maps without the finer ones that nobody reads."""

    def __init__(self, backbone: Backbone, *, learned: bool, count: int) -> None:
        super().__init__(backbone, learned=learned)
        self.sources, self.channels = self.sources[-count:], self.channels[-count:]
        self.strides, self.steps = self.strides[-count:], self.steps[-count:]


class MaskedMaps(nn.Module):
    """Maps, each with a mask of the cells that lie in an image: what transformers expects of a backbone."""

    def __init__(self, maps: CoarseMaps, *, norms: bool, least: int) -> None:
        super().__init__()
        self.maps = maps
        self.norms = MapNorms(maps.channels) if norms else None
        self.least = least  # positions that two stages choose among

    def forward(self, images: Tensor, inside: Tensor) -> list[tuple[Tensor, Tensor]]:
        levels = self.maps(images)
        if self.norms is not None:
            levels = self.norms(levels)
        positions = sum(math.prod(level.shape[-2:]) for level in levels)
        if len(levels) > 1:  # transformers adds the stride of 64
            positions += math.prod(-(-side // 2) for side in levels[-1].shape[-2:])
        if positions < self.least:
            raise ImageError(
                f"two_stage needs {self.least} positions, one for each query; images of {images.shape[-2]} x "
                f"{images.shape[-1]} px have {positions}. Use larger images or fewer queries."
            )
        return [(level, F.interpolate(inside[None].float(), size=level.shape[-2:])[0].bool()) for level in levels]


class DeformableDetector(DenseModel):
    """Boxes without masks. Build one with `mixlab.create_detector(..., "deformable_detr")`.

    The backbone loses its classifier; its final norm, which no map passes, is kept but not trained.
    """

    task = "detection"
    config: DetectorConfig
    backbone_path = "network.backbone.maps.backbone."

    def __init__(self, backbone: Backbone, config: DetectorConfig) -> None:
        super().__init__()
        options = config.deformable
        check_widths(config.width, options.heads)
        self.config, self.options = config, options
        learned = prepare(backbone, config.learned_maps)
        maps = CoarseMaps(backbone, learned=learned, count=3 if options.multi_scale else 1)
        self.network = build_network(maps, config, options)
        count = (options.decoder_layers + options.two_stage) if options.box_refine else 1
        self.classes: Modules[nn.Linear] = Modules(class_head(config) for _ in range(count))
        self.boxes: Modules[nn.Sequential] = Modules(box_head(config.width) for _ in range(count))
        if not options.two_stage:  # small boxes to begin with
            nn.init.constant_(cast(nn.Linear, self.boxes[0][-1]).bias[2:], -2.0)
        decoder: Any = self.network.decoder
        if options.box_refine:  # tuples: the decoder uses these heads but does not own them a second time
            decoder.bbox_embed = tuple(self.boxes)
        if options.two_stage:
            decoder.class_embed = tuple(self.classes)

    def forward(
        self, images: Sequence[Tensor] | Tensor, targets: Sequence[Mapping[str, Tensor]] | None = None
    ) -> list[dict[str, Tensor]] | dict[str, Tensor]:
        """Boxes, scores and labels of each normalized image (C, H, W); with targets, the losses by name.

        Boxes are (left, top, right, bottom) in pixels of the image given, labels count from 0. Losses are weighted:
        their sum is what is trained. Without data (on the meta device) there is nothing to find.
        """
        batch, sizes = as_batch(images)
        wanted = [] if targets is None else self.relative(targets, sizes)
        layers, proposals = self.predict(batch, inside(batch, sizes))
        if targets is not None:
            return set_losses(layers, proposals, wanted, shared=self.training)
        if batch.is_meta:
            return []
        scores, boxes = layers[-1]
        return [self.best(*one) for one in zip(scores.sigmoid(), boxes, sizes, strict=True)]

    def relative(self, targets: Sequence[Mapping[str, Tensor]], sizes: Sequence[tuple[int, int]]) -> list[Target]:
        """Checked targets with boxes as center and size in shares of their image."""
        found = []
        checked = check_targets(targets, sizes, replace(self.config, masks=False))
        for target, (height, width) in zip(checked, sizes, strict=True):
            first, last = (target["boxes"] / target["boxes"].new_tensor([width, height] * 2)).split(2, 1)
            boxes = torch.cat([(first + last) / 2, last - first], 1)
            found.append({"boxes": boxes, "class_labels": target["labels"] - 1})  # they come with a background
        return found

    def predict(self, images: Tensor, inside: Tensor) -> tuple[list[Layer], Layer | None]:
        """What each decoder layer finds, and the first of two stages."""
        found = self.network(images, pixel_mask=inside)
        layers, reference = [], found.init_reference_points
        for index in range(self.options.decoder_layers):
            hidden = found.intermediate_hidden_states[:, index]  # (B, queries, width)
            at = index if self.options.box_refine else 0
            offset = F.pad(inverse_sigmoid(reference.float()), (0, 4 - reference.shape[-1]))
            boxes = (self.boxes[at](hidden).float() + offset).sigmoid()
            layers.append((self.classes[at](hidden).float(), boxes))
            reference = found.intermediate_reference_points[:, index]
        if not self.options.two_stage:
            return layers, None
        return layers, (found.enc_outputs_class.float(), found.enc_outputs_coord_logits.float().sigmoid())

    def best(self, scores: Tensor, boxes: Tensor, size: tuple[int, int]) -> dict[str, Tensor]:
        """The best pairs of a query and a class; a query may stand for several classes, as in the authors' release."""
        kept, places = scores.flatten().topk(min(self.config.detections, scores.numel()))
        above = kept > self.config.score_threshold
        kept, places = kept[above], places[above]
        height, width = size
        corners = to_corners(boxes[places // scores.shape[1]]).clamp(0, 1)
        return {
            "boxes": corners * corners.new_tensor([width, height, width, height]),
            "scores": kept,
            "labels": places % scores.shape[1],
        }


def check_widths(width: int, heads: int) -> None:
    """A group of one channel has no variance where the coarsest map is a single cell."""
    if width % GROUPS or width < 2 * GROUPS or width % heads:
        raise ConfigError(
            f"Deformable DETR needs a width of {2 * GROUPS} or more that is a multiple of {GROUPS} and of its heads; "
            f"got width {width}, heads {heads}."
        )


def build_network(maps: CoarseMaps, config: DetectorConfig, options: DeformableOptions) -> "DeformableDetrModel":
    from transformers import DeformableDetrConfig, DeformableDetrModel

    network: Any = DeformableDetrModel(
        DeformableDetrConfig(
            backbone_config=stand_in(maps),
            num_queries=config.queries,
            two_stage_num_proposals=config.queries,
            encoder_layers=options.encoder_layers,
            decoder_layers=options.decoder_layers,
            encoder_ffn_dim=options.feedforward,
            decoder_ffn_dim=options.feedforward,
            encoder_attention_heads=options.heads,
            decoder_attention_heads=options.heads,
            encoder_n_points=options.points,
            decoder_n_points=options.points,
            d_model=config.width,
            dropout=options.dropout,
            num_feature_levels=4 if options.multi_scale else 1,
            with_box_refine=options.box_refine,
            two_stage=options.two_stage,
        )
    )
    network.backbone = MaskedMaps(maps, norms=config.norms, least=config.queries if options.two_stage else 0)
    start_as_authors(network)
    return network


def stand_in(maps: CoarseMaps) -> "PreTrainedConfig":
    """A backbone config with these channels: transformers builds its own backbone, which ours then replaces."""
    from mixlab.dense.hugging_face import MixlabBackboneConfig

    backbone = maps.backbone.config
    shallow = replace(backbone, depths=(1,) * len(backbone.depths))
    chosen = range(len(STRIDES))[-len(maps.steps) :]
    return MixlabBackboneConfig.of(shallow, levels="adapted", out_indices=list(chosen))


@torch.no_grad()
def start_as_authors(network: "DeformableDetrModel") -> None:
    """Xavier weights but for deformable attention, which transformers starts as the authors do; spread-out queries."""
    from transformers.models.deformable_detr import modeling_deformable_detr as parts

    deformable = parts.DeformableDetrMultiscaleDeformableAttention
    attention = {id(p) for part in network.modules() if isinstance(part, deformable) for p in part.parameters()}
    backbone = {id(p) for p in network.backbone.parameters()}
    for parameter in network.parameters():
        if parameter.ndim > 1 and id(parameter) not in attention | backbone:
            nn.init.xavier_uniform_(parameter)
    nn.init.normal_(network.level_embed)
    if not network.config.two_stage:
        nn.init.normal_(network.query_position_embeddings.weight)


def class_head(config: DetectorConfig) -> nn.Linear:
    head = nn.Linear(config.width, config.num_classes)
    nn.init.constant_(head.bias, -math.log((1 - PRIOR) / PRIOR))
    return head


def box_head(width: int) -> nn.Sequential:
    """Center and size of a box, relative to the image and to a reference; 0 to begin with."""
    last = nn.Linear(width, 4)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), last)


def inside(batch: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor:
    """1 where the batch holds an image, 0 where it is padding: (B, H, W)."""
    mask = batch.new_zeros(len(batch), *batch.shape[-2:], dtype=torch.long)
    for place, (height, width) in zip(mask, sizes, strict=True):
        place[:height, :width] = 1
    return mask


def to_corners(boxes: Tensor) -> Tensor:
    center, sides = boxes.split(2, -1)
    return torch.cat([center - sides / 2, center + sides / 2], -1)


def inverse_sigmoid(share: Tensor) -> Tensor:
    return torch.logit(share.clamp(0, 1), eps=1e-5)
