"""From an image to the tensor that a model takes, and mixing of whole batches; of timm's and torchvision's parts."""

import functools
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from math import floor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from mixlab.core.errors import ConfigError, DataError
from mixlab.models.config import Preprocessing

if TYPE_CHECKING:
    from mixlab.training.recipe import Augmentation

Transform = Callable[[Image.Image], Tensor]
Size = tuple[int, int]  # height, width

MODES = {1: "L", 3: "RGB"}
RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}
RANDOM = ("bilinear", "bicubic")  # what timm's "random" chooses from
RANDAUGMENT = re.compile(r"rand(-(m|n|p|mstd|mmax|inc)\d+(\.\d+)?|-mstdinf|-t[a-z0-9]+)*")
TRANSLATE = 0.45  # of the shorter side, timm's furthest shift in pixels


def train_transform(
    augmentation: "Augmentation", image_size: Size, preprocessing: Preprocessing, channels: int
) -> Transform:
    from torchvision import transforms

    steps: list[Any] = [ToMode(mode_for(channels, preprocessing)), *crop_steps(augmentation, image_size, preprocessing)]
    if augmentation.flip:
        steps.append(transforms.RandomHorizontalFlip(augmentation.flip))
    steps += [*policy_steps(augmentation, image_size, preprocessing), *tensor_steps(preprocessing)]
    if augmentation.erasing:
        from timm.data.random_erasing import RandomErasing

        steps.append(RandomErasing(augmentation.erasing, mode="pixel", device="cpu"))
    return transforms.Compose(steps)


def eval_transform(
    image_size: Size,
    preprocessing: Preprocessing,
    channels: int,
    crop: float | None = None,
    interpolation: str | None = None,
) -> Transform:
    """The image resized to `1 / crop` of the size, and the center cut out.

    In its own proportions it covers that size; with a `crop_mode` of "squash" it is squeezed into it.
    """
    from torchvision import transforms

    crop = preprocessing.crop if crop is None else crop
    if not 0 < crop <= 1:
        raise ConfigError(f"The crop is a share of the side in (0, 1]; got {crop}.")
    return transforms.Compose(
        [
            ToMode(mode_for(channels, preprocessing)),
            *evaluation_steps(image_size, crop, interpolation or preprocessing.interpolation, preprocessing.crop_mode),
            *tensor_steps(preprocessing),
        ]
    )


# -- steps ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToMode:
    mode: str

    def __call__(self, image: Image.Image) -> Image.Image:
        return image if image.mode == self.mode else image.convert(self.mode)


@dataclass(frozen=True)
class Resize:
    """To a size; with `cover` in the image's own proportions, so that it covers the size."""

    size: Size
    interpolation: str
    cover: bool = False

    def __call__(self, image: Image.Image) -> Image.Image:
        height, width = self.size_of(image)
        name = random.choice(RANDOM) if self.interpolation == "random" else self.interpolation
        return image if image.size == (width, height) else image.resize((width, height), RESAMPLING[name])

    def size_of(self, image: Image.Image) -> Size:
        """The height and width that an image gets."""
        height, width = self.size
        if not self.cover:
            return self.size
        if height * image.width >= width * image.height:  # the height decides
            return height, max(width, height * image.width // image.height)
        return max(height, width * image.height // image.width), width


@dataclass(frozen=True)
class Rescale:
    """To a random factor, between the two of `scale`, of what covers the size."""

    size: Size
    interpolation: str
    scale: tuple[float, ...]

    def __call__(self, image: Image.Image) -> Image.Image:
        factor = random.uniform(*self.scale)
        height, width = (max(1, round(factor * side)) for side in self.size)
        return Resize((height, width), self.interpolation, cover=True)(image)


@dataclass(frozen=True)
class ToTensor:
    """Normalised float32, (C, H, W): torchvision's ToTensor and Normalize in half the passes over memory."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, image: Image.Image) -> Tensor:
        pixels = torch.from_numpy(np.array(image))  # (H, W) or (H, W, C)
        planes = pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)
        mean, std = scales(self.mean, self.std)
        return planes.to(torch.float32, memory_format=torch.contiguous_format).sub_(mean).div_(std)


@functools.cache
def scales(mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Of pixels from 0 to 255, (C, 1, 1)."""
    mean_of, std_of = (255 * torch.tensor(values)[:, None, None] for values in (mean, std))
    return mean_of, std_of


def mode_for(channels: int, preprocessing: Preprocessing) -> str:
    if channels not in MODES:
        raise DataError(f"Images have 1 channel (grey) or 3 (RGB); the model takes {channels}. Build it with 1 or 3.")
    if not len(preprocessing.mean) == len(preprocessing.std) == channels:
        raise DataError(
            f"The preprocessing has {len(preprocessing.mean)} means and {len(preprocessing.std)} deviations for "
            f"{channels} channels. Give one of each per channel."
        )
    return MODES[channels]


def evaluation_steps(size: Size, crop: float, interpolation: str, crop_mode: str) -> list[Any]:
    """Resizing and the center crop."""
    from torchvision import transforms

    outer = floor(size[0] / crop), floor(size[1] / crop)
    return [Resize(outer, interpolation, cover=crop_mode == "center"), transforms.CenterCrop(size)]


def crop_steps(augmentation: "Augmentation", size: Size, preprocessing: Preprocessing) -> list[Any]:
    from torchvision import transforms

    if augmentation.crop == "center":
        return evaluation_steps(size, preprocessing.crop, augmentation.interpolation, preprocessing.crop_mode)
    if augmentation.crop == "squash":
        return [Resize(size, augmentation.interpolation)]
    if augmentation.crop == "padded":
        border = [round(augmentation.padding * side) for side in reversed(size)]  # left and right, top and bottom
        return [Resize(size, augmentation.interpolation), transforms.RandomCrop(size, padding=border)]
    if augmentation.crop == "rescaled":
        rescale = Rescale(size, augmentation.interpolation, augmentation.scale)
        return [rescale, transforms.RandomCrop(size, pad_if_needed=True)]
    from timm.data.transforms import RandomResizedCropAndInterpolation

    return [
        RandomResizedCropAndInterpolation(
            size, scale=augmentation.scale, ratio=augmentation.ratio, interpolation=augmentation.interpolation
        )
    ]


def policy_steps(augmentation: "Augmentation", size: Size, preprocessing: Preprocessing) -> list[Any]:
    """RandAugment, 3-Augment and colour jitter, each only if asked for."""
    from timm.data.auto_augment import auto_augment_transform, rand_augment_transform
    from torchvision import transforms

    mean = tuple(min(255, round(255 * value)) for value in preprocessing.mean)
    options = {"translate_const": int(min(size) * TRANSLATE), "img_mean": mean if len(mean) > 1 else mean[0]}
    if augmentation.interpolation != "random":
        options["interpolation"] = RESAMPLING[augmentation.interpolation]
    steps: list[Any] = []
    if augmentation.randaugment:
        if not RANDAUGMENT.fullmatch(augmentation.randaugment):
            raise ConfigError(
                f"randaugment is in timm's words, such as 'rand-m9-mstd0.5-inc1'; got {augmentation.randaugment!r}."
            )
        steps.append(with_posterize(rand_augment_transform(augmentation.randaugment, dict(options))))
    if augmentation.three_augment:
        steps.append(auto_augment_transform("3a", dict(options)))
    if augmentation.jitter:
        jitter = transforms.ColorJitter(*augmentation.jitter)
        steps.append(transforms.RandomApply([jitter], p=augmentation.jitter_probability))
    return steps


def with_posterize(randaugment: Any) -> Any:
    """timm's strongest posterize keeps 0 bits, which newer releases of Pillow refuse."""
    for operation in randaugment.ops:
        if operation.name.startswith("Posterize"):
            operation.aug_fn = posterize
    return randaugment


def posterize(image: Image.Image, bits: int, **_: object) -> Image.Image:
    return ImageOps.posterize(image, min(bits, 8)) if bits > 0 else Image.new(image.mode, image.size)


def tensor_steps(preprocessing: Preprocessing) -> list[Any]:
    return [ToTensor(preprocessing.mean, preprocessing.std)]


# -- batches -------------------------------------------------------------------------------------


class BatchMix:
    """Mixup or CutMix of a batch with itself reversed, and label smoothing: images and labels in, soft targets out.

    The same images, labels and seed give the same result, whatever was drawn before.
    """

    def __init__(self, augmentation: "Augmentation", num_classes: int) -> None:
        from timm.data import Mixup

        self.num_classes = num_classes
        self.smoothing = augmentation.label_smoothing
        self.mixes = (augmentation.mixup > 0 or augmentation.cutmix > 0) and augmentation.mix_probability > 0
        self.mixup = Mixup(
            mixup_alpha=augmentation.mixup,
            cutmix_alpha=augmentation.cutmix,
            prob=augmentation.mix_probability,
            switch_prob=augmentation.switch_probability,
            label_smoothing=augmentation.label_smoothing,
            num_classes=num_classes,
        )

    def __call__(self, images: Tensor, labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """(B, C, H, W) and (B,) to (B, C, H, W) and (B, classes)."""
        if not self.mixes:
            return images, self.targets(labels)
        count, images = len(images), images.clone()  # timm writes into what it is given
        if count % 2:  # timm pairs from both ends: the first image meets its own copy
            images, labels = torch.cat([images, images[:1]]), torch.cat([labels, labels[:1]])
        before = np.random.get_state()
        np.random.seed([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF])
        try:
            mixed, targets = self.mixup(images, labels)
        finally:
            np.random.set_state(before)
        return mixed[:count], targets[:count]

    def targets(self, labels: Tensor) -> Tensor:
        """Labels that are not mixed."""
        spread = torch.full((len(labels), self.num_classes), self.smoothing / self.num_classes, device=labels.device)
        return spread.scatter_add_(1, labels[:, None], torch.full_like(spread[:, :1], 1 - self.smoothing))
