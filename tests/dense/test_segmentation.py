from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from mixlab.core.errors import ConfigError, DataError, UnreadableImage
from mixlab.core.processes import Processes
from mixlab.data.dense import MaskData, Masked
from mixlab.dense.segmentation import (
    Inference,
    classes_at,
    evaluate_segmentation,
    predict_multiscale,
    predict_sliding,
    predict_whole,
    segment,
    window_starts,
)
from mixlab.dense.segmenter import Segmenter, create_segmenter
from mixlab.metrics.segmentation import confusion, segmentation_scores

# a 3 x 4 image of 4 classes: class 3 occurs nowhere, one pixel is ignored
TRUTH = torch.tensor([[0, 0, 1, 1], [0, 2, 1, 255], [0, 2, 2, 1]], dtype=torch.uint8)
PREDICTED = torch.tensor([[0, 1, 1, 1], [0, 2, 2, 0], [0, 2, 0, 1]], dtype=torch.uint8)


class Spatial(nn.Module):
    """A "segmenter" without context: the scores of a pixel are its channels."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, int]] = []

    def forward(self, image: Tensor) -> Tensor:
        self.sizes.append((image.shape[2], image.shape[3]))
        return image


class Scenes(MaskData):
    """Images whose left half is black and right half white, of two classes."""

    class_names = ("dark", "light")

    def __init__(self, count: int = 4, broken: tuple[int, ...] = ()) -> None:
        self.count, self.broken = count, broken

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> Masked:
        if index in self.broken:
            raise UnreadableImage(self.name(index))
        mask = np.zeros((40, 56 + 8 * index), np.uint8)
        mask[:, mask.shape[1] // 2 :] = 1
        return Masked(Image.fromarray(255 * mask).convert("RGB"), mask)

    def name(self, index: int) -> str:
        return f"scene {index}"


@pytest.fixture(scope="module")
def model() -> Segmenter:
    torch.manual_seed(0)
    return create_segmenter("convformer_pico", "linear", num_classes=2, image_size=48)


# -- measures ------------------------------------------------------------------------------------


def test_scores_of_a_case_counted_by_hand() -> None:
    scores = segmentation_scores(confusion(PREDICTED, TRUTH, 4), ["a", "b", "c", "d"])
    iou = [3 / 5, 3 / 5, 2 / 4]  # hits over union, without the ignored pixel
    assert scores["mIoU"] == pytest.approx(sum(iou) / 3)
    assert scores["pixel_accuracy"] == pytest.approx(8 / 11)
    assert scores["mean_accuracy"] == pytest.approx((3 / 4 + 3 / 4 + 2 / 3) / 3)
    assert [row["IoU"] for row in scores["classes"]] == [*map(pytest.approx, iou), None]
    assert [row["pixels"] for row in scores["classes"]] == [4, 4, 3, 0]
    assert scores["classes"][3] == {"name": "d", "IoU": None, "accuracy": None, "pixels": 0}


def test_scores_agree_with_torchmetrics() -> None:
    from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

    truth, predicted = torch.randint(0, 6, (5, 30, 20)), torch.randint(0, 6, (5, 30, 20))
    predicted = torch.where(torch.rand(truth.shape) < 0.7, truth, predicted)
    truth[torch.rand(truth.shape) < 0.1] = 255
    matrix = sum((confusion(p, t, 6) for p, t in zip(predicted, truth, strict=True)), torch.zeros(6, 7).long())
    scores = segmentation_scores(matrix)
    jaccard = MulticlassJaccardIndex(6, average="none", ignore_index=255)(predicted, truth)
    accuracy = MulticlassAccuracy(6, average="micro", ignore_index=255)(predicted, truth)
    assert [row["IoU"] for row in scores["classes"]] == pytest.approx(jaccard.tolist(), abs=1e-6)
    assert scores["mIoU"] == pytest.approx(jaccard.mean().item(), abs=1e-6)
    assert scores["pixel_accuracy"] == pytest.approx(accuracy.item(), abs=1e-6)


def test_a_class_that_is_only_predicted_counts_with_an_iou_of_0() -> None:
    scores = segmentation_scores(confusion(torch.tensor([[0, 1]]), torch.tensor([[0, 0]]), 3))
    assert scores["mIoU"] == pytest.approx((1 / 2 + 0) / 2)
    assert scores["mean_accuracy"] == pytest.approx(1 / 2)


def test_pixels_without_a_prediction_are_wrong_for_their_class_only() -> None:
    scores = segmentation_scores(confusion(torch.tensor([[0, 255]]), torch.tensor([[0, 0]]), 2))
    assert scores["mIoU"] == scores["pixel_accuracy"] == 0.5


def test_a_truth_outside_the_classes_is_an_error() -> None:
    with pytest.raises(DataError, match="has class 4"):
        confusion(PREDICTED, TRUTH + 2, 4)


# -- predictions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("side", "window", "stride", "starts"),
    [(512, 512, 341, [0]), (683, 512, 341, [0, 171]), (1194, 512, 341, [0, 341, 682]), (300, 512, 341, [0])],
)
def test_the_last_window_ends_with_the_image(side: int, window: int, stride: int, starts: list[int]) -> None:
    assert window_starts(side, window, stride) == starts


@pytest.mark.parametrize("size", [(70, 97), (32, 200), (20, 40), (64, 64)])
def test_windows_that_agree_average_to_the_whole(size: tuple[int, int]) -> None:
    image, spatial = torch.randn(2, 3, *size), Spatial()
    torch.testing.assert_close(predict_sliding(spatial, image, 48, 32), image)
    assert max(max(sizes) for sizes in spatial.sizes) <= 48


def test_overlapping_windows_average_their_scores() -> None:
    numbers = iter((1.0, 5.0))

    class Numbered(nn.Module):
        def forward(self, image: Tensor) -> Tensor:
            return torch.full_like(image, next(numbers))

    scores = predict_sliding(Numbered(), torch.zeros(1, 1, 40, 60), 40, 30)  # columns 0-39 and 20-59
    assert scores[0, 0, 0].tolist() == [1.0] * 20 + [3.0] * 20 + [5.0] * 20


def test_images_below_the_least_side_are_continued(model: Segmenter) -> None:
    with torch.no_grad():
        assert predict_whole(model, torch.randn(1, 3, 9, 50)).shape == (1, 2, 9, 50)


def test_scales_and_flips_average_probabilities() -> None:
    image = torch.randn(1, 3, 48, 64)
    once = predict_multiscale(Spatial(), image, [1.0], flip=False)
    torch.testing.assert_close(once, image.log_softmax(1))
    torch.testing.assert_close(predict_multiscale(Spatial(), image, [1.0], flip=True), once)
    spatial = Spatial()
    scores = predict_multiscale(spatial, image, [0.75, 1.5])
    assert spatial.sizes == [(36, 48), (36, 48), (72, 96), (72, 96)]
    torch.testing.assert_close(scores.exp().sum(1), torch.ones(1, 48, 64))


def test_a_mirrored_image_is_predicted_like_its_mirror_image(model: Segmenter) -> None:
    image = torch.randn(1, 3, 48, 64)
    with torch.no_grad():
        there, back = predict_multiscale(model.eval(), image), predict_multiscale(model, image.flip(-1))
    torch.testing.assert_close(there, back.flip(-1), rtol=1e-3, atol=1e-4)


def test_the_best_class_at_a_larger_size_is_found_a_few_classes_at_a_time() -> None:
    scores = torch.randn(21, 13, 17)
    larger = torch.nn.functional.interpolate(scores[None], (31, 45), mode="bilinear")[0].argmax(0)
    assert torch.equal(classes_at(scores, 31, 45).long(), larger)
    scores[20, 0, 0] = torch.nan
    assert classes_at(scores, 13, 17)[0, 0] == 255


def test_an_image_is_segmented_at_its_own_size(model: Segmenter) -> None:
    image = Image.new("L", (50, 77))
    ways = [Inference(), Inference(mode="sliding", window=40), Inference(mode="multiscale", scales=(0.75, 1.0))]
    for way in ways:
        mask = segment(model.train(), image, way)
        assert mask.shape == (77, 50)
        assert mask.dtype == np.uint8
        assert mask.max() < 2
    assert model.training


# -- datasets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["whole", "sliding", "multiscale"])
def test_a_dataset_is_evaluated_and_processes_add_up(model: Segmenter, mode: Any) -> None:
    data = Scenes(4, broken=(2,))
    whole = evaluate_segmentation(model, data, mode=mode, scales=(1.0, 1.25), window=40 if mode == "sliding" else None)
    assert (whole["images"], whole["unreadable"]) == (3, 1)
    assert [row["name"] for row in whole["classes"]] == ["dark", "light"]
    assert sum(row["pixels"] for row in whole["classes"]) == 40 * (56 + 64 + 80)
    assert 0 <= whole["mIoU"] <= whole["pixel_accuracy"] <= 1


def test_a_rank_takes_its_share(model: Segmenter) -> None:
    class Second(Processes):
        def sum(self, values: Tensor) -> Tensor:
            return values

    seen: list[int] = []
    found = evaluate_segmentation(model, Scenes(4), processes=Second(1, 2), watch=seen.append)
    assert found["images"] == len(seen) == 2
    assert sum(row["pixels"] for row in found["classes"]) == 40 * (64 + 80)


def test_a_segmenter_learns_what_is_measured() -> None:
    model, data = (
        create_segmenter("convformer_pico", num_classes=2, width=16, auxiliary_width=8, image_size=40),
        Scenes(),
    )
    images = torch.stack([torch.zeros(3, 40, 56), torch.ones(3, 40, 56)]) * 4 - 2
    images[0, :, :, 28:], images[1, :, :, 28:] = 2, -2
    masks = (images[:, 0] > 0).long()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 3e-3)
    before = evaluate_segmentation(model, data)["mIoU"]
    for _ in range(15):
        optimizer.zero_grad()
        sum(model(images, masks).values()).backward()
        optimizer.step()
    after = evaluate_segmentation(model, data)
    assert after["mIoU"] > max(0.8, before)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: evaluate_segmentation(model, Scenes(), mode=cast(Any, "tiles")), "modes whole, sliding"),
        (lambda model: evaluate_segmentation(model, Scenes(), mode="sliding", window=32, stride=40), "stride from 1"),
        (lambda model: predict_multiscale(model, torch.zeros(1, 3, 32, 32), []), "scales above 0"),
    ],
)
def test_settings_that_do_not_fit_are_errors(model: Segmenter, call: Callable[..., Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(model)


def test_other_classes_are_an_error(model: Segmenter) -> None:
    data = Scenes()
    data.class_names = ("a", "b", "c")  # type: ignore[assignment]
    with pytest.raises(DataError, match=r"tells 2 classes apart; the data has 3"):
        evaluate_segmentation(model, data)
