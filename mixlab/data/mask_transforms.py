"""From an image with a mask to tensors: random size, crop, flip and colors in training, one size in evaluation."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from mixlab.core.errors import ConfigError
from mixlab.data.dense import IGNORE, Masked
from mixlab.data.kinds import Array
from mixlab.data.transforms import Resize, Size, ToMode, ToTensor, mode_for
from mixlab.models.config import Preprocessing

if TYPE_CHECKING:
    from mixlab.training.recipe import Augmentation

MaskTransform = Callable[[Masked], tuple[Tensor, Tensor]]

LONGEST = 4  # the longer side may be this many times the shorter: 2048 x 512 for ADE20K
LARGEST_SHARE = 0.75  # of a crop that one class should fill
TRIES = 10  # crops that are looked at for one that mixes classes
UNUSABLE = ("randaugment", "three_augment", "erasing", "mixup", "cutmix", "label_smoothing")


def train_mask_transform(
    augmentation: "Augmentation", image_size: Size, preprocessing: Preprocessing, channels: int
) -> MaskTransform:
    """Image (C, height, width) and mask (height, width), int64. Of the augmentation: scale, flip, jitter."""
    from torchvision import transforms

    if augmentation.crop != "rescaled":
        raise ConfigError(f"Masks are augmented with crop = 'rescaled' and a scale; got crop = {augmentation.crop!r}.")
    refuse(augmentation, "segmentation")
    colors: list[Any] = []
    if augmentation.jitter:
        jitter = transforms.ColorJitter(*augmentation.jitter)
        colors.append(transforms.RandomApply([jitter], p=augmentation.jitter_probability))
    return TrainMasks(
        size=image_size,
        scale=augmentation.scale,
        interpolation=augmentation.interpolation,
        flip=augmentation.flip,
        steps=transforms.Compose([ToMode(mode_for(channels, preprocessing)), *colors]),
        to_tensor=ToTensor(preprocessing.mean, preprocessing.std),
    )


def refuse(augmentation: "Augmentation", task: str) -> None:
    """Raise for what mixes or changes images in ways that masks and boxes do not follow."""
    set_too = [word for word in UNUSABLE if getattr(augmentation, word)]
    if set_too:
        raise ConfigError(f"For {task} there is no {' and no '.join(set_too)}: leave them out of the augmentation.")


def eval_mask_transform(short_side: int | None, preprocessing: Preprocessing, channels: int) -> MaskTransform:
    """The image with a shorter side of `short_side` (None: as it is), the mask at its original size, int64."""
    return EvalMasks(eval_image_transform(short_side, preprocessing, channels))


def eval_image_transform(
    short_side: int | None, preprocessing: Preprocessing, channels: int
) -> Callable[[Image.Image], Tensor]:
    """Images of very long shapes get a smaller shorter side: the longer one is at most four times `short_side`."""
    if short_side is not None and short_side < 1:
        raise ConfigError(f"The shorter side is 1 px or more, or None for images as they are; got {short_side}.")
    mode = ToMode(mode_for(channels, preprocessing))
    return EvalImage(short_side, preprocessing.interpolation, mode, ToTensor(preprocessing.mean, preprocessing.std))


def fitted(image: Image.Image, short_side: float) -> Size:
    """The height and width in the image's own proportions that have this shorter side."""
    factor = min(short_side / min(image.size), LONGEST * short_side / max(image.size))
    return max(1, round(factor * image.height)), max(1, round(factor * image.width))


# -- training ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainMasks:
    """Resized to a random factor of the size, cropped at random, mirrored, recolored, padded to the size."""

    size: Size
    scale: tuple[float, ...]
    interpolation: str
    flip: float
    steps: Callable[[Image.Image], Image.Image]
    to_tensor: ToTensor

    def __call__(self, sample: Masked) -> tuple[Tensor, Tensor]:
        wanted = fitted(sample.image, min(self.size) * random.uniform(*self.scale))
        mask = resized_mask(sample.mask, wanted)
        top, left = mixed_place(mask, self.size)
        mask = mask[top : top + self.size[0], left : left + self.size[1]]
        image = Resize(wanted, self.interpolation)(sample.image)
        image = image.crop((left, top, left + mask.shape[1], top + mask.shape[0]))
        if random.random() < self.flip:
            image, mask = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), mask[:, ::-1]
        return padded(self.to_tensor(self.steps(image)), as_tensor(mask), self.size)


def resized_mask(mask: Array, size: Size) -> Array:
    """Each pixel takes the class at its center."""
    return np.asarray(Image.fromarray(mask).resize((size[1], size[0]), Image.Resampling.NEAREST))


def mixed_place(mask: Array, size: Size) -> tuple[int, int]:
    """Top and left of a random crop; the last of some tries if one class fills too much of each."""
    for _ in range(TRIES):
        top, left = (random.randint(0, max(0, have - want)) for have, want in zip(mask.shape, size, strict=True))
        counts = np.bincount(mask[top : top + size[0], left : left + size[1]].ravel(), minlength=256)[:IGNORE]
        if 0 < counts.max() < LARGEST_SHARE * counts.sum():
            break
    return top, left


def padded(image: Tensor, mask: Tensor, size: Size) -> tuple[Tensor, Tensor]:
    """Filled up right and bottom: the image with the mean color, the mask with what is ignored."""
    border = (0, size[1] - mask.shape[1], 0, size[0] - mask.shape[0])
    return F.pad(image, border), F.pad(mask, border, value=IGNORE)


def as_tensor(mask: Array) -> Tensor:
    return torch.from_numpy(mask.astype(np.int64))


# -- evaluation ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvalImage:
    short_side: int | None
    interpolation: str
    to_mode: ToMode
    to_tensor: ToTensor

    def __call__(self, image: Image.Image) -> Tensor:
        size = (image.height, image.width) if self.short_side is None else fitted(image, self.short_side)
        return self.to_tensor(Resize(size, self.interpolation)(self.to_mode(image)))


@dataclass(frozen=True)
class EvalMasks:
    image: Callable[[Image.Image], Tensor]

    def __call__(self, sample: Masked) -> tuple[Tensor, Tensor]:
        return self.image(sample.image), as_tensor(sample.mask)
