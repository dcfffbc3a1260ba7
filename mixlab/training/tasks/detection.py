"""Which objects an image shows and where: the detector's losses, and average precision as COCO defines it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mixlab.data.loader import Batch, Loader
from mixlab.metrics.detection import evaluate_detection
from mixlab.models.dense_model import DenseModel
from mixlab.training.tasks.segmentation import total


@dataclass
class DetectionTask:
    """Validation takes detections back to pixels of the original images."""

    train: Loader
    val: Loader | None
    metric: str = "box_AP"
    shown: tuple[str, ...] = ("box_AP", "box_AP50", "mask_AP", "mask_AP50")

    def loss(self, model: nn.Module, batch: Batch, seed: int) -> Tensor:
        return total(model(batch.images, batch.labels))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {} if self.val is None else precision(model, self.val)


def precision(model: nn.Module, loader: Loader, watch: Callable[[int], None] | None = None) -> dict[str, float]:
    """Average precision of boxes and, where there are any, masks; -1 where there is no such object."""
    assert isinstance(model, DenseModel)

    def batches() -> Iterator[tuple[Any, Any, Any]]:
        for batch in loader.epoch(0):
            yield batch.images, batch.labels, batch.indices
            if watch is not None:
                watch(len(batch.indices))

    return evaluate_detection(model, batches(), loader.data.class_names)
