"""What a detector is given: images of any sizes as one batch, and targets that are checked before they train."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mixlab.core.errors import DataError, ImageError
from mixlab.dense.detector import DetectorConfig
from mixlab.models.pyramid import STRIDES


def as_batch(images: Sequence[Tensor] | Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
    """Images (C, H, W) as (B, C, H, W), zeros right and below up to a multiple of the coarsest stride; and their sizes.

    Zeros in a normalized image are the mean color.
    """
    if not len(images) or any(not isinstance(image, Tensor) or image.ndim != 3 for image in images):
        raise ImageError("A detector takes a list of one or more images (C, H, W), each a tensor.")
    sizes = [(image.shape[1], image.shape[2]) for image in images]
    height, width = (-(-max(sides) // STRIDES[-1]) * STRIDES[-1] for sides in zip(*sizes, strict=True))
    batch = images[0].new_zeros(len(images), images[0].shape[0], height, width)
    for place, image in zip(batch, images, strict=True):
        place[:, : image.shape[1], : image.shape[2]].copy_(image)
    return batch, sizes


def check_targets(
    targets: Sequence[Mapping[str, Tensor]], sizes: Sequence[tuple[int, int]], config: DetectorConfig
) -> list[dict[str, Tensor]]:
    """Targets as torchvision's parts take them (labels from 1, masks where they are needed), or a DataError."""
    if len(targets) != len(sizes):
        raise DataError(f"Each image needs its target; got {len(sizes)} images and {len(targets)} targets.")
    return [check_target(index, target, sizes[index], config) for index, target in enumerate(targets)]


def check_target(
    index: int, target: Mapping[str, Tensor], size: tuple[int, int], config: DetectorConfig
) -> dict[str, Tensor]:
    boxes, labels = target["boxes"], target["labels"]
    if boxes.shape != (len(labels), 4):
        raise DataError(
            f"Target {index}: boxes (N, 4) for {len(labels)} labels are expected; got {tuple(boxes.shape)}."
        )
    flat = (boxes[:, 2:] <= boxes[:, :2]).any(1)
    if flat.any():
        first = int(flat.nonzero()[0])
        raise DataError(
            f"Target {index}: box {first} is {boxes[first].tolist()}. Boxes are left, top, right, bottom with a width "
            f"and height above 0. Drop such boxes: `mixlab data check` lists them."
        )
    wrong = (labels < 0) | (labels >= config.num_classes)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise DataError(
            f"Target {index}: label {first} is {int(labels[first])}; this detector has classes 0 to "
            f"{config.num_classes - 1}."
        )
    checked = {"boxes": boxes.float(), "labels": labels.long() + 1}
    return {**checked, "masks": check_masks(index, target, size)} if config.masks else checked


def check_masks(index: int, target: Mapping[str, Tensor], size: tuple[int, int]) -> Tensor:
    count, masks = len(target["boxes"]), target.get("masks")
    if masks is None:
        if count:
            raise DataError(
                f"Target {index} has no masks, which the mask heads need. Build the detector with masks=False for data "
                f"with boxes only."
            )
        return torch.zeros(0, *size, dtype=torch.bool, device=target["boxes"].device)
    if tuple(masks.shape) != (count, *size):
        raise DataError(f"Target {index}: masks {(count, *size)} are expected; got {tuple(masks.shape)}.")
    return masks
