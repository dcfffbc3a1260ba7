"""Average precision against a short implementation of its definition, on scenes small enough to think about."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mixlab.core.errors import DataError
from mixlab.metrics.detection import DetectionScores, average_precision, evaluate_detection
from mixlab.models.dense_model import DenseModel

Objects = dict[str, Tensor]
NAMES = ("square", "bar")
SIDE = 200


def objects(boxes: Sequence[Sequence[float]], labels: Sequence[int], **more: Any) -> Objects:
    """Objects that fill their boxes."""
    corners = torch.tensor(boxes, dtype=torch.float32).view(-1, 4)
    masks = torch.zeros(len(corners), SIDE, SIDE, dtype=torch.bool)
    for mask, (left, top, right, bottom) in zip(masks, corners.int().tolist(), strict=True):
        mask[top:bottom, left:right] = True
    extra = {name: torch.tensor(values) for name, values in more.items()}
    return {"boxes": corners, "labels": torch.tensor(labels, dtype=torch.int64), "masks": masks, **extra}


def scene() -> tuple[list[Objects], list[Objects]]:
    truths = [
        objects([[10, 10, 30, 30], [50, 50, 110, 110], [100, 0, 200, 120]], [0, 0, 1]),
        objects([[0, 0, 20, 20], [40, 40, 60, 60]], [0, 1]),
        objects([], []),
    ]
    found = [
        objects(
            [[11, 10, 31, 30], [50, 50, 110, 100], [52, 52, 112, 112], [100, 0, 200, 100]],
            [0, 0, 0, 1],
            scores=[0.9, 0.8, 0.7, 0.6],
        ),
        objects([[5, 5, 25, 25], [40, 40, 60, 57], [120, 120, 150, 150]], [0, 1, 0], scores=[0.95, 0.5, 0.4]),
        objects([[7, 7, 90, 90]], [1], scores=[0.3]),
    ]
    return found, truths


def overlap(one: Tensor, other: Tensor) -> float:
    return ((one & other).sum() / (one | other).sum()).item()


def independent(found: Sequence[Objects], truths: Sequence[Objects], label: int, threshold: float) -> float:
    """101-point interpolated average precision of one class; objects fill their boxes, so masks tell all."""
    listed = [
        (float(score), image, own["masks"][index])
        for image, own in enumerate(found)
        for index, (score, kind) in enumerate(zip(own["scores"], own["labels"], strict=True))
        if kind == label
    ]
    free = {(i, j) for i, own in enumerate(truths) for j, kind in enumerate(own["labels"]) if kind == label}
    total, right = len(free), []
    for _, image, mask in sorted(listed, key=lambda one: -one[0]):
        candidates = [(overlap(mask, truths[i]["masks"][j]), (i, j)) for i, j in free if i == image]
        best, place = max(candidates, default=(0.0, (-1, -1)))
        right.append(best >= threshold)
        if right[-1]:
            free.discard(place)
    hits = np.cumsum(right)
    recall, precise = hits / total, hits / np.arange(1, len(hits) + 1)
    points = np.linspace(0, 1, 101)
    return float(np.mean([precise[recall >= point].max(initial=0) for point in points]))


def test_average_precision_agrees_with_its_definition() -> None:
    found, truths = scene()
    scores = average_precision(found, truths, NAMES)
    thresholds = np.linspace(0.5, 0.95, 10)
    table = {
        (label, threshold): independent(found, truths, label, threshold)
        for label, threshold in itertools.product((0, 1), thresholds)
    }
    for kind in ("box", "mask"):
        assert scores[f"{kind}_AP"] == pytest.approx(np.mean(list(table.values())))
        for name, threshold in (("AP50", 0.5), ("AP75", 0.75)):
            wanted = np.mean([table[label, thresholds[int(20 * (threshold - 0.5))]] for label in (0, 1)])
            assert scores[f"{kind}_{name}"] == pytest.approx(wanted)
    assert 0 < scores["box_AP"] < scores["box_AP50"] < 1


def test_perfect_detections_score_1_at_every_size_that_occurs() -> None:
    truths = scene()[1]
    found = [own | {"scores": torch.ones(len(own["labels"]))} for own in truths]
    scores = average_precision(found, truths, NAMES)
    assert {name for name, value in scores.items() if value == pytest.approx(1)} == set(scores)
    small = average_precision(found[1:], truths[1:], NAMES)
    assert (small["box_APs"], small["box_APm"], small["mask_APl"]) == pytest.approx((1, -1, -1))


def test_what_is_found_in_a_crowd_counts_as_nothing() -> None:
    truths = [objects([[0, 0, 20, 20], [100, 100, 200, 200]], [0, 0], crowd=[False, True])]
    found = [objects([[0, 0, 20, 20], [110, 110, 140, 140]], [0, 0], scores=[0.5, 0.9])]
    assert average_precision(found, truths, NAMES)["box_AP"] == pytest.approx(1)
    plain = [{name: value for name, value in truths[0].items() if name != "crowd"}]
    assert average_precision(found, plain, NAMES)["box_AP"] < 0.5


def test_a_given_area_decides_the_size() -> None:
    truths = [objects([[0, 0, 20, 20]], [0], area=[2000.0])]
    scores = average_precision([truths[0] | {"scores": torch.ones(1)}], truths, NAMES)
    assert scores["box_APs"] == -1
    assert scores["box_APm"] == pytest.approx(1)


def test_without_masks_on_one_side_there_are_box_scores_only() -> None:
    found, truths = scene()
    for own in found:
        del own["masks"]
    assert set(average_precision(found, truths, NAMES)) == {
        f"box_{name}" for name in ("AP", "AP50", "AP75", "APs", "APm", "APl")
    }


def test_nothing_found_scores_0_and_no_images_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    truths = scene()[1]
    nothing = [objects([], [], scores=[]) for _ in truths]
    scores = average_precision(nothing, truths, NAMES)
    assert scores["box_AP"] == scores["mask_AP"] == 0
    with pytest.raises(DataError, match="no images"):
        average_precision([], [], NAMES)
    assert capsys.readouterr().out == ""


def test_batches_and_repeated_images_do_not_change_the_result() -> None:
    found, truths = scene()
    scores = DetectionScores(NAMES)
    scores.add(found[:2], truths[:2], ["a", "b"])
    scores.add(found[1:], truths[1:], ["b", "c"])
    assert scores.compute() == average_precision(found, truths, NAMES)


def test_labels_and_mask_sizes_that_do_not_fit_are_errors() -> None:
    found, truths = scene()
    with pytest.raises(DataError, match=r"labels \[0, 1\]; there are 1 classes"):
        average_precision(found, truths, ("square",))
    found[0]["masks"] = found[0]["masks"][:, :100]
    with pytest.raises(DataError, match="several sizes"):
        average_precision(found, truths, NAMES)


class Known(DenseModel):
    """Finds what it was told, whatever it sees, in images of half the size."""

    def __init__(self, found: Sequence[Objects]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.found = iter(found)

    def forward(self, images: Sequence[Tensor]) -> list[Objects]:
        assert not self.training
        return [next(self.found) for _ in images]


def test_a_detector_is_scored_in_pixels_of_the_original_images() -> None:
    found, truths = scene()
    halved = [own | {"boxes": own["boxes"] / 2, "masks": own["masks"][:, ::2, ::2]} for own in found]
    asked = [own | {"size": torch.tensor([SIDE, SIDE]), "scale": torch.tensor([0.5, 0.5])} for own in truths]
    model = Known(halved).train()
    batches = [([torch.zeros(3, 100, 100)], [target], [index]) for index, target in enumerate(asked)]
    scores = evaluate_detection(model, batches, NAMES)
    assert model.training
    assert scores["box_AP50"] == pytest.approx(average_precision(found, truths, NAMES)["box_AP50"])
