"""From an image with objects to what a detector takes: a part of the image, its size, and targets that follow exactly.

Each transform first decides on a `View`, a rectangle of the original at some size, and then applies it once: the image
is interpolated a single time, however often it is resized and cropped on the way.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mixlab.core.errors import require
from mixlab.data.dense import Annotated, Objects
from mixlab.data.transforms import RESAMPLING, ToMode, mode_for, tensor_steps
from mixlab.models.config import Preprocessing

Rectangle = tuple[float, float, float, float]  # left, top, right, bottom
Target = dict[str, Tensor]
ObjectTransform = Callable[[Annotated], tuple[Tensor, Target]]

MULTI_SCALE = tuple(range(480, 801, 32))  # shorter sides; HyenaPixel 4.3, and what MetaFormer 3.2 follows
LONGER = 1333
LEAST = 1.0  # px of width and height below which nothing can be learnt from a box


@dataclass(frozen=True)
class RandomCrop:
    """As for DETR: now and then the image is resized, a part cut out, and that part resized like a whole image."""

    probability: float = 0.5
    shorter: tuple[int, ...] = (400, 500, 600)
    sides: tuple[int, int] = (384, 600)  # of the part

    def __post_init__(self) -> None:
        smallest, largest = self.sides
        require(
            0 <= self.probability <= 1 and bool(self.shorter) and min(self.shorter) > 0 and 0 < smallest <= largest,
            f"a probability, shorter sides above 0 and a rising pair of sides for the crop; got {self}.",
        )


@dataclass(frozen=True)
class View:
    """A rectangle of an image, shown at (width, height), perhaps mirrored."""

    box: Rectangle
    size: tuple[int, int]
    mirrored: bool = False

    @property
    def scale(self) -> tuple[float, float]:
        """Pixels of the view per pixel of the image, across and down."""
        left, top, right, bottom = self.box
        return self.size[0] / (right - left), self.size[1] / (bottom - top)

    def image(self, image: Image.Image, interpolation: str) -> Image.Image:
        if self.box != whole(image.size) or self.size != image.size:
            image = image.resize(self.size, RESAMPLING[interpolation], box=self.box)
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if self.mirrored else image

    def boxes(self, boxes: Tensor) -> Tensor:
        """(N, 4), not clipped."""
        left, top = self.box[:2]
        moved = (boxes - boxes.new_tensor((left, top, left, top))) * boxes.new_tensor(self.scale * 2)
        if not self.mirrored:
            return moved
        return torch.stack((self.size[0] - moved[:, 2], moved[:, 1], self.size[0] - moved[:, 0], moved[:, 3]), dim=1)

    def masks(self, masks: Tensor) -> Tensor:
        """(N, H, W) to (N, h, w): each pixel is what is at its center."""
        (width, height), (across, down) = self.size, self.scale
        rows = centers(height, self.box[1], down, masks.shape[1])
        columns = centers(width, self.box[0], across, masks.shape[2])
        columns = columns.flip(0) if self.mirrored else columns
        return masks.index_select(1, rows.to(masks.device)).index_select(2, columns.to(masks.device))


def centers(count: int, start: float, scale: float, limit: int) -> Tensor:
    """The original pixel at the center of each pixel of a view."""
    places = start + (torch.arange(count, dtype=torch.float64) + 0.5) / scale
    return places.long().clamp(0, limit - 1)


def train_object_transform(
    *,
    shorter: Sequence[int] = MULTI_SCALE,
    longer: int = LONGER,
    flip: float = 0.5,
    preprocessing: Preprocessing,
    channels: int,
    crop: RandomCrop | None = None,
    jitter: tuple[float, ...] | None = None,
) -> ObjectTransform:
    """The shorter side is one of `shorter`, drawn anew each time, unless the longer one would exceed `longer`.

    `jitter` is how far brightness, contrast, saturation and hue may move. Crowds are left out of the targets: what
    they cover trains as background.
    """
    require(0 <= flip <= 1, f"a probability for flip; got {flip}.")
    require(jitter is None or len(jitter) == 4, f"four numbers for jitter; got {jitter}.")
    finish = Finish.of(preprocessing, channels, jitter)
    return TrainObjects(tuple(check_sides(shorter, longer)), longer, flip, crop, finish)


def eval_object_transform(shorter: int, longer: int, preprocessing: Preprocessing, channels: int) -> ObjectTransform:
    """The target stays that of the original image, crowds included; `restored` takes predictions back to it."""
    (side,) = check_sides((shorter,), longer)
    return EvalObjects(side, longer, Finish.of(preprocessing, channels))


def object_batch(pairs: Sequence[tuple[Tensor, Target]]) -> tuple[list[Tensor], list[Target]]:
    """Images keep their own sizes."""
    return [image for image, _ in pairs], [target for _, target in pairs]


def restored(prediction: Target, target: Target) -> Target:
    """Boxes and masks that were found in a transformed image, in pixels of the original."""
    height, width = target["size"].tolist()
    boxes = prediction["boxes"] / target["scale"].to(prediction["boxes"]).repeat(2)
    found = prediction | {"boxes": torch.minimum(boxes.clamp(min=0), boxes.new_tensor((width, height) * 2))}
    if "masks" in prediction:
        masks = prediction["masks"]
        found["masks"] = View(whole((masks.shape[2], masks.shape[1])), (width, height)).masks(masks)
    return found


# -- steps ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finish:
    """What happens to the pixels: interpolation, colors, and the tensor."""

    interpolation: str
    mode: ToMode
    steps: tuple[Any, ...]

    @classmethod
    def of(cls, preprocessing: Preprocessing, channels: int, jitter: tuple[float, ...] | None = None) -> "Finish":
        steps = tensor_steps(preprocessing)
        if jitter:
            from torchvision import transforms

            steps.insert(0, transforms.ColorJitter(*jitter))
        return cls(preprocessing.interpolation, ToMode(mode_for(channels, preprocessing)), tuple(steps))

    def __call__(self, image: Image.Image, view: View) -> Tensor:
        seen: Any = view.image(self.mode(image), self.interpolation)
        for step in self.steps:
            seen = step(seen)
        return seen


@dataclass(frozen=True)
class TrainObjects:
    shorter: tuple[int, ...]
    longer: int
    flip: float
    crop: RandomCrop | None
    finish: Finish

    def __call__(self, sample: Annotated) -> tuple[Tensor, Target]:
        image, objects = sample
        view = self.draw(image.size)
        target = without_crowds(objects)
        return self.finish(image, view), seen_through(view, target) | {"size": size_of(image)}

    def draw(self, size: tuple[int, int]) -> View:
        box = whole(size)
        if self.crop is not None and random.random() < self.crop.probability:
            box = self.part(size, self.crop)
        sides = box[2] - box[0], box[3] - box[1]
        return View(box, fitted(sides, random.choice(self.shorter), self.longer), random.random() < self.flip)

    def part(self, size: tuple[int, int], crop: RandomCrop) -> Rectangle:
        """A rectangle of the original, drawn in pixels of the resized image."""
        resized = fitted(size, random.choice(crop.shorter), self.longer)
        spans = []
        for side, original in zip(resized, size, strict=True):
            smallest, largest = (min(limit, side) for limit in crop.sides)
            length = random.randint(smallest, largest)
            start = random.randint(0, side - length)
            spans.append((start * original / side, (start + length) * original / side))
        (left, right), (top, bottom) = spans
        return left, top, right, bottom


@dataclass(frozen=True)
class EvalObjects:
    shorter: int
    longer: int
    finish: Finish

    def __call__(self, sample: Annotated) -> tuple[Tensor, Target]:
        image, objects = sample
        view = View(whole(image.size), fitted(image.size, self.shorter, self.longer))
        return self.finish(image, view), as_target(objects) | {
            "size": size_of(image),
            "scale": torch.tensor(view.scale),  # across, down
        }


def whole(size: tuple[int, int]) -> Rectangle:
    return 0.0, 0.0, float(size[0]), float(size[1])


def fitted(size: tuple[float, float], shorter: int, longer: int) -> tuple[int, int]:
    """A (width, height) in the same proportions, with the shorter side as wanted unless the longer gets too long."""
    scale = min(shorter / min(size), longer / max(size))
    width, height = (max(1, round(side * scale)) for side in size)
    return width, height


def check_sides(shorter: Sequence[int], longer: int) -> Sequence[int]:
    require(
        bool(shorter) and min(shorter) > 0 and max(shorter) <= longer,
        f"shorter sides above 0 and at most the longer one; got {list(shorter)} and {longer}.",
    )
    return shorter


def size_of(image: Image.Image) -> Tensor:
    return torch.tensor((image.height, image.width))


def as_target(objects: Objects) -> Target:
    target = {"boxes": objects.boxes, "labels": objects.labels, "area": objects.area, "crowd": objects.crowd}
    return target if objects.masks is None else target | {"masks": objects.masks}


def without_crowds(objects: Objects) -> Target:
    target = as_target(objects)
    return {key: value[~objects.crowd] for key, value in target.items()} if objects.crowd.any() else target


def seen_through(view: View, target: Target) -> Target:
    """Objects in pixels of a view. Those of which nothing is left, or less than a pixel's width, are dropped."""
    uncut = view.boxes(target["boxes"])
    boxes = torch.minimum(uncut.clamp(min=0), uncut.new_tensor(view.size * 2))
    kept = (boxes[:, 2:] - boxes[:, :2] >= LEAST).all(dim=1)
    across, down = view.scale
    seen = target | {"boxes": boxes, "area": target["area"] * (across * down) * share(boxes, uncut)}
    if "masks" in target:
        seen["masks"] = view.masks(target["masks"])
        pixels = seen["masks"].flatten(1).sum(dim=1)
        seen["area"] = pixels.to(target["area"].dtype)
        kept &= pixels > 0
    return seen if kept.all() else {key: value[kept] for key, value in seen.items()}


def share(part: Tensor, uncut: Tensor) -> Tensor:
    """Of each box's area that is left in its part."""
    left, before = ((boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(dim=1) for boxes in (part, uncut))
    return left / before
