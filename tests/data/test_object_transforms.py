import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from mixlab.core.errors import ConfigError
from mixlab.data.dense import Annotated, Objects
from mixlab.data.object_transforms import (
    ObjectTransform,
    RandomCrop,
    Target,
    View,
    eval_object_transform,
    object_batch,
    restored,
    seen_through,
    train_object_transform,
)
from mixlab.data.scenes import open_scene_objects
from mixlab.data.seeding import seeded
from mixlab.models.config import Preprocessing

PLAIN = Preprocessing(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), interpolation="nearest")
CROP = RandomCrop(probability=1.0, shorter=(40, 50, 60), sides=(20, 44))


def train(**changes: Any) -> ObjectTransform:
    settings = {"shorter": (48, 64), "longer": 160, "preprocessing": PLAIN, "channels": 3, **changes}
    return train_object_transform(**settings)


def drawn(size: tuple[int, int], boxes: list[tuple[int, int, int, int]], crowd: int | None = None) -> Annotated:
    """A black image in which object number n fills its box with brightness 100 + n."""
    image, masks = Image.new("RGB", size), torch.zeros(len(boxes), size[1], size[0], dtype=torch.bool)
    for number, (left, top, right, bottom) in enumerate(boxes):
        image.paste((100 + number,) * 3, (left, top, right, bottom))
        masks[number, top:bottom, left:right] = True
    objects = Objects(
        boxes=torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        labels=torch.arange(len(boxes)),
        masks=masks,
        crowd=torch.arange(len(boxes)) == (-1 if crowd is None else crowd),
        area=masks.flatten(1).sum(1).float(),
    )
    return Annotated(image, objects)


def without_masks(sample: Annotated) -> Annotated:
    objects = sample.objects
    return Annotated(sample.image, Objects(objects.boxes, objects.labels, None, objects.crowd, objects.area))


def levels(image: Tensor) -> Tensor:
    return (image[0] * 255).round().long()  # (H, W)


SAMPLE = drawn((80, 60), [(5, 10, 25, 50), (40, 5, 75, 30)])


@pytest.mark.parametrize("crop", [None, CROP])
def test_masks_and_boxes_follow_the_pixels(crop: RandomCrop | None) -> None:
    transform, counts = train(crop=crop, shorter=(48, 72)), set()
    for seed in range(60):
        with seeded(seed):
            image, target = transform(SAMPLE)
        counts.add(len(target["labels"]))
        for label, box, mask in zip(target["labels"], target["boxes"], target["masks"], strict=True):
            wrong = mask != (levels(image) == 100 + label)
            assert wrong.sum() <= (0 if crop is None else max(wrong.shape))  # a center may lie between two pixels
            rows, columns = torch.nonzero(mask, as_tuple=True)
            tight = torch.stack((columns.min(), rows.min(), columns.max() + 1, rows.max() + 1))
            assert (box - tight).abs().max() <= 1  # a box ends between pixels, a mask does not
        for number in {0, 1} - set(target["labels"].tolist()):
            assert (levels(image) == 100 + number).sum(0).gt(0).sum() <= 1  # at most a pixel's width was dropped
    assert counts == ({2} if crop is None else {0, 1, 2})


def test_boxes_are_scaled_exactly() -> None:
    sample = drawn((100, 50), [(10, 20, 30, 40)])
    image, target = train(shorter=(75,), flip=0.0, longer=200)(sample)
    assert image.shape == (3, 75, 150)
    assert target["boxes"].tolist() == [[15, 30, 45, 60]]
    assert target["area"].tolist() == [900]
    assert target["size"].tolist() == [50, 100]


def test_a_flip_mirrors_boxes_and_masks() -> None:
    _, target = train(shorter=(60,), flip=1.0)(SAMPLE)
    assert target["boxes"].tolist() == [[55, 10, 75, 50], [5, 5, 40, 30]]
    assert SAMPLE.objects.masks is not None
    assert torch.equal(target["masks"], SAMPLE.objects.masks.flip(2))


def test_sizes_are_drawn_and_the_longer_side_is_limited() -> None:
    transform = train(shorter=(32, 48, 64), longer=80)
    shapes = {tuple(transform(SAMPLE)[0].shape[1:]) for _ in range(60)}
    assert shapes == {(32, 43), (48, 64), (60, 80)}


def test_a_crop_is_at_most_its_sides_of_the_resized_image() -> None:
    steps: Any = train(crop=CROP)
    for _ in range(200):
        left, top, right, bottom = steps.part((80, 60), CROP)
        assert 0 <= left < right <= 80
        assert 0 <= top < bottom <= 60
        for scale in (40 / 60, 50 / 60, 60 / 60):
            if all(19.4 <= side * scale <= 44.6 for side in (right - left, bottom - top)):
                break
        else:
            pytest.fail("no resized image has such a crop")


def test_an_image_smaller_than_the_crop_is_taken_whole() -> None:
    transform = train(crop=RandomCrop(probability=1.0, shorter=(10,), sides=(384, 600)), shorter=(60,), flip=0.0)
    assert torch.equal(transform(SAMPLE)[0], train(shorter=(60,), flip=0.0)(SAMPLE)[0])


def test_objects_outside_the_view_are_dropped() -> None:
    target = {
        "boxes": torch.tensor([[0.0, 0, 10, 10], [10, 10, 30, 30], [19.5, 0, 40, 10]]),
        "labels": torch.arange(3),
        "area": torch.tensor([100.0, 400, 205]),
    }
    seen = seen_through(View((10, 10, 20, 20), (20, 20)), target)
    assert seen["labels"].tolist() == [1]
    assert seen["boxes"].tolist() == [[0, 0, 20, 20]]
    assert seen["area"].tolist() == [400]  # a quarter of it, at four times the pixels


def test_an_object_whose_mask_left_the_image_is_dropped_although_its_box_did_not() -> None:
    masks = torch.zeros(1, 20, 20, dtype=torch.bool)
    masks[0, 0, :] = masks[0, :, 0] = True  # along the top and the left
    target = {"boxes": torch.tensor([[0.0, 0, 20, 20]]), "labels": torch.tensor([3]), "area": torch.tensor([39.0])}
    seen = seen_through(View((10, 10, 20, 20), (20, 20)), target | {"masks": masks})
    assert [len(value) for value in seen.values()] == [0, 0, 0, 0]


def test_an_image_without_objects_stays_one() -> None:
    empty = drawn((80, 60), [])
    for sample in (empty, without_masks(empty)):
        _, target = train(crop=CROP)(sample)
        assert target["boxes"].shape == (0, 4)
        assert target["labels"].shape == (0,)


def test_without_masks_there_are_none() -> None:
    for transform in (train(crop=CROP), eval_object_transform(48, 160, PLAIN, 3)):
        assert "masks" not in transform(without_masks(SAMPLE))[1]


def test_crowds_are_evaluated_but_not_trained_on() -> None:
    sample = drawn((80, 60), [(5, 10, 25, 50), (40, 5, 75, 30)], crowd=0)
    _, target = train(shorter=(60,), flip=0.0)(sample)
    assert (target["labels"].tolist(), target["crowd"].tolist()) == ([1], [False])
    _, target = eval_object_transform(48, 160, PLAIN, 3)(sample)
    assert (target["labels"].tolist(), target["crowd"].tolist()) == ([0, 1], [True, False])


def test_evaluation_keeps_the_originals_coordinates() -> None:
    image, target = eval_object_transform(30, 160, PLAIN, 3)(SAMPLE)
    assert image.shape == (3, 30, 40)
    assert torch.equal(target["boxes"], SAMPLE.objects.boxes)
    assert target["masks"].shape == (2, 60, 80)
    assert target["size"].tolist() == [60, 80]
    assert target["scale"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("size", [(80, 60), (61, 97), (33, 120)])
def test_predictions_find_back_to_the_original(size: tuple[int, int]) -> None:
    sample = drawn(size, [(5, 10, 25, 50)])
    image, target = eval_object_transform(110, 300, PLAIN, 3)(sample)
    mask = levels(image) == 100
    boxes = target["boxes"] * target["scale"].repeat(2)
    found = restored({"boxes": boxes, "masks": mask[None], "scores": torch.ones(1)}, target)
    assert torch.allclose(found["boxes"], target["boxes"], atol=1e-4)
    assert torch.equal(found["masks"], target["masks"])
    assert found["scores"].tolist() == [1]


def test_predictions_beyond_the_image_are_cut() -> None:
    _, target = eval_object_transform(60, 160, PLAIN, 3)(SAMPLE)
    found = restored({"boxes": torch.tensor([[-5.0, -5, 300, 300]])}, target)
    assert found["boxes"].tolist() == [[0, 0, 80, 60]]


def test_interpolation_is_that_of_a_plain_resize() -> None:
    photo = Image.fromarray(np.random.RandomState(0).randint(0, 256, (60, 80, 3)).astype(np.uint8))
    image, _ = eval_object_transform(45, 160, Preprocessing(), 3)(Annotated(photo, SAMPLE.objects))
    pixels = torch.from_numpy(np.array(photo.resize((60, 45), Image.Resampling.BICUBIC))).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in (Preprocessing().mean, Preprocessing().std))
    assert torch.allclose(image, (pixels - mean) / std, atol=1e-5)


def test_grey_images_and_grey_models_work() -> None:
    gray = Preprocessing(mean=(0.5,), std=(0.25,))
    assert train(preprocessing=gray, channels=1, jitter=(0.4, 0.4, 0.4, 0.1))(SAMPLE)[0].shape[0] == 1
    assert train()(Annotated(SAMPLE.image.convert("L"), SAMPLE.objects))[0].shape[0] == 3


def test_jitter_changes_colors_alone() -> None:
    plain, target = train(shorter=(60,), flip=0.0)(SAMPLE)
    jittered, same = train(shorter=(60,), flip=0.0, jitter=(0.5, 0.5, 0.5, 0.1))(SAMPLE)
    assert not torch.equal(plain, jittered)
    assert all(torch.equal(target[key], same[key]) for key in target)


def test_the_same_seed_gives_the_same_view() -> None:
    transform = train(crop=CROP, jitter=(0.4, 0.4, 0.4, 0.1))

    def once(seed: int) -> tuple[Tensor, Target]:
        with seeded(seed):
            return transform(SAMPLE)

    assert torch.equal(once(3)[0], once(3)[0])
    assert len({once(seed)[0].shape for seed in range(20)}) > 2


def test_the_original_is_left_as_it_was() -> None:
    before = SAMPLE.objects.boxes.clone()
    random.seed(0)
    for _ in range(5):
        train(crop=CROP)(SAMPLE)
    assert torch.equal(SAMPLE.objects.boxes, before)


def test_scenes_become_batches_of_lists() -> None:
    data, transform = open_scene_objects("val"), pickle.loads(pickle.dumps(train(crop=CROP)))
    images, targets = object_batch([transform(data.read(index)) for index in range(4)])
    assert len(images) == len(targets) == 4
    for image, target in zip(images, targets, strict=True):
        assert target["masks"].shape == (len(target["boxes"]), *image.shape[1:])


@pytest.mark.parametrize(
    "wrong",
    [{"shorter": ()}, {"shorter": (0,)}, {"shorter": (200,)}, {"flip": 1.5}, {"jitter": (0.1,)}],
)
def test_wrong_settings_are_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        train(**wrong)


def test_a_wrong_crop_is_an_error() -> None:
    with pytest.raises(ConfigError, match="rising pair"):
        RandomCrop(sides=(600, 384))
