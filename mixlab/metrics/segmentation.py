"""How good predicted classes of pixels are.

The measures are fractions: mIoU is the mean intersection over union of the classes that occur in the truth or in a
prediction; others are left out.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mixlab.core.errors import DataError
from mixlab.data.dense import IGNORE


def confusion(predicted: Tensor, truth: Tensor, num_classes: int) -> Tensor:
    """Pixels by (true class, predicted class), int64; the last column counts those without a prediction.

    Matrices of several images add up. Where the truth is IGNORE nothing is counted.
    """
    counted = truth != IGNORE
    true, said = truth[counted].long(), predicted[counted].long()
    if len(true) and int(true.max()) >= num_classes:
        raise DataError(f"The truth has class {int(true.max())}; the model tells {num_classes} classes apart.")
    cells = true * (num_classes + 1) + said.clamp(max=num_classes)
    return torch.bincount(cells, minlength=num_classes * (num_classes + 1)).view(num_classes, num_classes + 1)


def segmentation_scores(matrix: Tensor, class_names: Sequence[str] = ()) -> dict[str, Any]:
    """mIoU, pixel_accuracy, mean_accuracy and a row per class, from a (summed) confusion matrix.

    A class without a pixel in truth and predictions has no IoU, one without a pixel in the truth no accuracy: None,
    and no part of the means.
    """
    matrix = matrix.double().cpu()
    hits, true, said = matrix.diagonal(), matrix.sum(1), matrix[:, :-1].sum(0)
    union = true + said - hits
    iou, accuracy = share(hits, union), share(hits, true)
    names = class_names or [str(number) for number in range(len(hits))]
    rows = zip(names, iou, accuracy, true.long().tolist(), strict=True)
    return {
        "mIoU": mean(iou),
        "pixel_accuracy": float(hits.sum() / true.sum().clamp(min=1)),
        "mean_accuracy": mean(accuracy),
        "classes": [{"name": name, "IoU": one, "accuracy": two, "pixels": pixels} for name, one, two, pixels in rows],
    }


def share(part: Tensor, whole: Tensor) -> list[float | None]:
    return [one / all_ if all_ else None for one, all_ in zip(part.tolist(), whole.tolist(), strict=True)]


def mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0
