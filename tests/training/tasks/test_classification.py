from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mixlab.data import Loader, eval_transform, open_data
from mixlab.models.zoo import model_config
from mixlab.training.tasks.classification import accuracy, best_crop, soft_cross_entropy


class Says(nn.Module):
    """The same scores for every image."""

    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self.scores = scores

    def forward(self, images: Tensor) -> Tensor:
        return self.scores.expand(len(images), -1)


def val() -> Loader:
    preprocessing = model_config("caformer_pico").preprocessing
    return Loader(
        open_data("digits", "val"), eval_transform((32, 32), preprocessing, 3), batch_size=64, train=False, seed=0
    )


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_equal_scores_and_scores_that_are_no_numbers_are_never_right(value: float) -> None:
    found = accuracy(Says(torch.full((10,), value)), val())
    assert (found["top1"], found["top5"], found["images"]) == (0, 0, 360)


def test_accuracy_counts_the_right_class_among_the_first() -> None:
    data, scores = open_data("digits", "val"), torch.arange(10.0)  # 9 first, then 8, ...
    labels: list[Any] = [data.label(index) for index in range(len(data))]  # type: ignore[union-attr]
    found = accuracy(Says(scores), val())
    assert found["top1"] == pytest.approx(100 * sum(label == 9 for label in labels) / 360)
    assert found["top5"] == pytest.approx(100 * sum(label >= 5 for label in labels) / 360)


def test_the_largest_of_equally_good_crops_is_taken() -> None:
    crop, result = best_crop(lambda crop: {"top1": 3.0 if crop >= 0.9 else 1.0, "crop": crop})
    assert (crop, result["crop"]) == (1.0, 1.0)


def test_soft_labels_that_are_hard_give_the_usual_loss() -> None:
    scores, labels = torch.randn(4, 5), torch.tensor([0, 3, 2, 2])
    soft = nn.functional.one_hot(labels, 5).float()
    torch.testing.assert_close(soft_cross_entropy(scores, soft), nn.functional.cross_entropy(scores, labels))
