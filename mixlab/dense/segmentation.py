"""Which class every pixel belongs to: predictions for images of any size, and how good they are on a dataset.

Predictions are scores (B, classes, H, W) at the size of the given images.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from mixlab.core.errors import ConfigError, DataError, UnreadableImage, require
from mixlab.core.processes import Processes
from mixlab.data.dense import IGNORE, MaskData
from mixlab.data.kinds import Array
from mixlab.data.mask_transforms import eval_image_transform
from mixlab.dense.segmenter import Segmenter
from mixlab.metrics.segmentation import confusion, segmentation_scores
from mixlab.models.backbone import evaluating
from mixlab.models.config import MIN_SIDE

Mode = Literal["whole", "sliding", "multiscale"]
Predict = Callable[[Tensor], Tensor]

MODES = ("whole", "sliding", "multiscale")
WINDOW, STRIDE = 512, 341  # Vision-LSTM, Table 12
SCALES = (0.75, 1.0, 1.25, 1.5, 1.75)
CLASSES_AT_ONCE = 8  # that are brought to the size of a large image


def predict_whole(model: nn.Module, image: Tensor) -> Tensor:
    """Scores of images in one go; sides below the least that backbones take are continued and cut off again."""
    height, width = image.shape[-2:]
    bottom, right = max(0, MIN_SIDE - height), max(0, MIN_SIDE - width)
    if bottom or right:
        image = F.pad(image, (0, right, 0, bottom), mode="replicate")
    return model(image)[..., :height, :width].float()


def predict_sliding(model: nn.Module, image: Tensor, window: int = WINDOW, stride: int = STRIDE) -> Tensor:
    """Scores averaged over square windows; the last ones end with the image, and a shorter side has one of its size."""
    require(1 <= stride <= window, f"a stride from 1 to the window of {window} px; got {stride}.")
    height, width = image.shape[-2:]
    total: Tensor | None = None
    count = image.new_zeros(1, 1, height, width)
    for top in window_starts(height, window, stride):
        for left in window_starts(width, window, stride):
            place = (..., slice(top, top + window), slice(left, left + window))
            scores = predict_whole(model, image[place])
            if total is None:
                total = scores.new_zeros(*scores.shape[:2], height, width)
            total[place] += scores
            count[place] += 1
    assert total is not None
    return total / count


def window_starts(side: int, window: int, stride: int) -> list[int]:
    last = max(0, side - window)
    return [*range(0, last, stride), last]


def predict_multiscale(
    model: nn.Module | Predict, image: Tensor, scales: Sequence[float] = SCALES, flip: bool = True
) -> Tensor:
    """The logarithm of the mean probability over the image at several scales, each also mirrored with `flip`.

    In place of a model a function may predict each version of the image, such as `predict_sliding` on it.
    """
    require(bool(scales) and min(scales) > 0, f"scales above 0; got {list(scales)}.")
    predict: Predict = partial(predict_whole, model) if isinstance(model, nn.Module) else model
    size, total = image.shape[-2:], image.new_zeros(())
    for scale in scales:
        scaled = F.interpolate(image, [max(1, round(scale * side)) for side in size], mode="bilinear", antialias=True)
        total = total + chances(predict(scaled), size)
        if flip:
            total = total + chances(predict(scaled.flip(-1)).flip(-1), size)
    return (total / (len(scales) * (1 + flip))).clamp(min=torch.finfo(total.dtype).tiny).log()


def chances(scores: Tensor, size: Sequence[int]) -> Tensor:
    return F.interpolate(scores, size, mode="bilinear").softmax(1)


def classes_at(scores: Tensor, height: int, width: int) -> Tensor:
    """The class with the highest of scores (classes, H, W) at another size, uint8; IGNORE where one is no number.

    A few classes at a time: those of a large photo would not fit into memory together.
    """
    best = scores.new_full((height, width), -torch.inf)
    found = torch.full((height, width), IGNORE, dtype=torch.uint8, device=scores.device)
    for first in range(0, len(scores), CLASSES_AT_ONCE):
        part = scores[first : first + CLASSES_AT_ONCE]
        if part.shape[1:] != best.shape:
            part = F.interpolate(part[None], (height, width), mode="bilinear")[0]
        value, index = part.max(0)  # the value is no number if one of them is none
        index = torch.where(value.isnan(), IGNORE, first + index).to(torch.uint8)
        value = value.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        better = value > best
        best, found = torch.where(better, value, best), torch.where(better, index, found)
    return found


@dataclass(frozen=True, kw_only=True)
class Inference:
    """How images are predicted. None: as the model's config says; the window is its image size."""

    mode: Mode | None = None
    short_side: int | None = None
    window: int | None = None
    stride: int | None = None
    scales: tuple[float, ...] | None = None
    flip: bool | None = None

    def predictor(self, model: Segmenter) -> Predict:
        """`multiscale` slides a window over each scale if one is given, else it takes each as a whole."""
        own = model.config
        mode = self.mode or own.mode
        if mode not in MODES:
            raise ConfigError(f"Segmentation is evaluated in one of the modes {', '.join(MODES)}; got {mode!r}.")
        window = self.window or own.image_size
        stride = self.stride or (None if self.window else own.stride) or max(1, 2 * window // 3)
        if mode == "whole":
            return partial(predict_whole, model)
        slide = partial(predict_sliding, model, window=window, stride=stride)
        if mode == "sliding":
            return slide
        inner = slide if self.window or self.stride or own.stride else model
        flip = own.flip if self.flip is None else self.flip
        return partial(predict_multiscale, inner, scales=self.scales or own.scales, flip=flip)


@torch.inference_mode()
def segment(model: Segmenter, image: Image.Image, inference: Inference | None = None) -> Array:
    """The class of every pixel of an image (H, W), uint8, at its own size."""
    inference, settings = inference or Inference(), model.backbone.config
    short_side = inference.short_side or model.config.image_size
    transform = eval_image_transform(short_side, settings.preprocessing, settings.in_channels)
    device = next(model.parameters()).device
    with evaluating(model):
        scores = inference.predictor(model)(transform(image)[None].to(device))
    return classes_at(scores[0], image.height, image.width).cpu().numpy()


def evaluate_segmentation(
    model: Segmenter,
    data: MaskData,
    *,
    mode: Mode | None = None,
    short_side: int | None = None,
    window: int | None = None,
    stride: int | None = None,
    scales: Sequence[float] | None = None,
    flip: bool | None = None,
    processes: Processes | None = None,
    watch: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """`segmentation_scores` of a split, each image once over all processes and compared at its original size.

    Images that cannot be read are left out: `images` and `unreadable` say how many were measured and how many not.
    """
    inference = Inference(
        mode=mode,
        short_side=short_side,
        window=window,
        stride=stride,
        scales=None if scales is None else tuple(scales),
        flip=flip,
    )
    classes = model.config.num_classes
    if classes != len(data.class_names):
        raise DataError(f"The model tells {classes} classes apart; the data has {len(data.class_names)}.")
    own = processes or Processes()
    matrix = torch.zeros(classes, classes + 1, dtype=torch.int64)
    counts = torch.zeros(2, dtype=torch.int64)
    for found in predictions(model, data, inference, range(own.rank, len(data), own.world)):
        counts += torch.tensor([found is not None, found is None])
        if found is not None:
            matrix += confusion(*found, classes)
        if watch is not None:
            watch(1)
    matrix, counts = (own.sum(values.to(own.device)).cpu() for values in (matrix, counts))
    measured, unreadable = counts.tolist()
    return {**segmentation_scores(matrix, data.class_names), "images": measured, "unreadable": unreadable}


def predictions(
    model: Segmenter, data: MaskData, inference: Inference, indices: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor] | None]:
    """Predicted and true classes of images, None for one that cannot be read."""
    for index in indices:
        try:
            image, mask = data.read(index)
        except UnreadableImage:
            yield None
            continue
        yield torch.from_numpy(segment(model, image, inference)), torch.from_numpy(np.array(mask))
