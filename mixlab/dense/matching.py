"""Losses of a set of predictions: each object is matched to one of them, the others learn that they are nothing.

Matching and losses are those of transformers; their weights are Deformable DETR's (Zhu et al., 2021).
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, distributed

Layer = tuple[Tensor, Tensor]  # class scores before the sigmoid (B, N, classes), relative boxes (B, N, 4)
Target = dict[str, Tensor]  # `boxes` (N, 4) as center and size in shares of the image, `class_labels` (N,) from 0
LOSS_WEIGHTS = {"class_loss": 2.0, "box_loss": 5.0, "giou_loss": 2.0}
MATCH_COSTS = {"class_cost": 2, "bbox_cost": 5, "giou_cost": 2}
FOCAL_ALPHA = 0.25


def set_losses(
    layers: Sequence[Layer], proposals: Layer | None, targets: list[Target], *, shared: bool
) -> dict[str, Tensor]:
    """Weighted losses of the last layer by name, of the earlier ones together, and of proposals (object or not).

    `shared`: every process computes these losses now, so they are divided by the objects of all of them.
    """
    count = object_count(targets, layers[0][0].device, shared=shared)  # first: every process takes part
    if not all(boxes.isfinite().all() for _, boxes in layers):  # cannot be matched; training stops and says so
        return {"class_loss": total(scores.sum() + boxes.sum() for scores, boxes in layers)}
    losses = layer_losses(*layers[-1], targets, count)
    if len(layers) > 1:
        earlier = (layer_losses(*layer, targets, count) for layer in layers[:-1])
        losses["auxiliary_loss"] = total(loss for layer in earlier for loss in layer.values())
    if proposals is not None:
        objects = [{**one, "class_labels": torch.zeros_like(one["class_labels"])} for one in targets]
        losses["proposal_loss"] = total(layer_losses(*proposals, objects, count).values())
    return losses


def layer_losses(scores: Tensor, boxes: Tensor, targets: list[Target], count: float) -> dict[str, Tensor]:
    """The three losses of one layer after its own matching; `count` objects share them."""
    from transformers.loss.loss_deformable_detr import DeformableDetrHungarianMatcher, DeformableDetrImageLoss

    outputs, nothing = {"logits": scores, "pred_boxes": boxes}, torch.zeros(0, dtype=torch.long)
    matcher = DeformableDetrHungarianMatcher(**MATCH_COSTS)
    empty = not any(len(one["boxes"]) for one in targets)  # which the matcher cannot take
    matched = [(nothing, nothing)] * len(targets) if empty else matcher(outputs, targets)
    criterion = DeformableDetrImageLoss(matcher, scores.shape[-1], FOCAL_ALPHA, [])
    found = criterion.loss_labels(outputs, targets, matched, count)
    found |= criterion.loss_boxes(outputs, targets, matched, count)
    losses = {"class_loss": found["loss_ce"], "box_loss": found["loss_bbox"], "giou_loss": found["loss_giou"]}
    return {name: LOSS_WEIGHTS[name] * loss for name, loss in losses.items()}


def object_count(targets: Iterable[Target], device: torch.device, *, shared: bool) -> float:
    """Objects in the batch, as a mean over the processes that train together; at least 1."""
    count = sum(len(one["boxes"]) for one in targets)
    if not (shared and distributed.is_available() and distributed.is_initialized()):
        return max(count, 1)
    counts = torch.tensor(float(count), device=device)
    distributed.all_reduce(counts)
    return max(counts.item() / distributed.get_world_size(), 1)


def total(losses: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(losses)).sum()
