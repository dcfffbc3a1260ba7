"""Which class an image shows: the loss with soft labels, accuracy, and the search for the best crop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixlab.core.processes import Processes
from mixlab.data.loader import Batch, Loader
from mixlab.data.transforms import BatchMix

CROPS = tuple(crop / 100 for crop in range(80, 101, 5))


@dataclass
class ClassificationTask:
    """Cross-entropy against labels that mixup, CutMix and smoothing may spread over classes."""

    train: Loader
    val: Loader | None
    mix: BatchMix | None = None
    label_smoothing: float = 0.0
    processes: Processes = Processes()
    metric: str = "top1"
    shown: tuple[str, ...] = ("top1",)

    def loss(self, model: nn.Module, batch: Batch, seed: int) -> Tensor:
        if self.mix is None or not model.training:
            return F.cross_entropy(model(batch.images).float(), batch.labels, label_smoothing=self.label_smoothing)
        images, targets = self.mix(batch.images, batch.labels, seed)
        return soft_cross_entropy(model(images), targets)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {} if self.val is None else accuracy(model, self.val, self.processes)


def soft_cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """Scores (B, classes) against a distribution per image."""
    return -(targets * F.log_softmax(scores.float(), -1)).sum(-1).mean()


def accuracy(
    model: nn.Module, loader: Loader, processes: Processes | None = None, watch: Callable[[int], None] | None = None
) -> dict[str, float]:
    """Top-1 and top-5 in percent, mean cross-entropy and the number of images, each counted once over all processes."""
    processes = processes or Processes()
    sums = torch.zeros(4, dtype=torch.float64, device=processes.device)
    for batch in loader.epoch(0):
        labels = batch.labels.to(processes.device)
        scores = model(batch.images.to(processes.device)).float()
        # classes that are not behind the right one: equal scores and scores that are no numbers count against it
        ranks = (~(scores < scores.gather(1, labels[:, None]))).sum(1) - 1
        loss = F.cross_entropy(scores, labels, reduction="sum")
        sums += torch.stack([(ranks < 1).sum(), (ranks < 5).sum(), loss, torch.ones_like(labels).sum()]).to(sums)
        if watch is not None:
            watch(len(labels))
    first, five, loss, count = processes.sum(sums).tolist()
    count = max(count, 1)
    return {"top1": 100 * first / count, "top5": 100 * five / count, "val_loss": loss / count, "images": count}


def best_crop(
    evaluate: Callable[[float], dict[str, float]], crops: Sequence[float] = CROPS
) -> tuple[float, dict[str, float]]:
    """The crop ratio with the highest top-1, the larger one of equals (HyenaPixel, section 4.1), and its result."""
    results = {crop: evaluate(crop) for crop in crops}
    crop = max(results, key=lambda one: (results[one]["top1"], one))
    return crop, results[crop]
