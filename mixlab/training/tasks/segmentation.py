"""Which class every pixel shows: the decoder's losses, and mIoU on whole images."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from mixlab.core.processes import Processes
from mixlab.data.dense import MaskData
from mixlab.data.loader import Batch, Loader
from mixlab.dense.segmentation import evaluate_segmentation
from mixlab.dense.segmenter import Segmenter


@dataclass
class SegmentationTask:
    """Validation compares whole images at their original size; `inference` are words of `evaluate_segmentation`."""

    train: Loader
    val: MaskData | None
    processes: Processes = Processes()
    inference: dict[str, Any] = field(default_factory=dict)
    metric: str = "mIoU"
    shown: tuple[str, ...] = ("mIoU", "pixel_accuracy")

    def loss(self, model: nn.Module, batch: Batch, seed: int) -> Tensor:
        return total(model(batch.images, batch.labels))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {} if self.val is None else scores(model, self.val, self.processes, **self.inference)


def total(losses: dict[str, Tensor]) -> Tensor:
    """What is trained: the sum of the losses of a model on a backbone."""
    return sum(losses.values(), start=next(iter(losses.values())).new_zeros(()))


def scores(
    model: nn.Module,
    data: MaskData,
    processes: Processes,
    watch: Callable[[int], None] | None = None,
    **inference: Any,
) -> dict[str, float]:
    """mIoU, pixel and mean accuracy and the number of images, without the rows of single classes."""
    assert isinstance(model, Segmenter)
    found = evaluate_segmentation(model, data, processes=processes, watch=watch, **inference)
    return {name: float(value) for name, value in found.items() if name != "classes"}
