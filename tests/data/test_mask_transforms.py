import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mixlab.core.errors import ConfigError, DataError
from mixlab.data.dense import IGNORE, Masked
from mixlab.data.kinds import Array
from mixlab.data.mask_transforms import eval_mask_transform, fitted, mixed_place, train_mask_transform
from mixlab.data.seeding import seeded
from mixlab.models.config import Preprocessing
from mixlab.training.recipe import Augmentation, load_recipe

GRAY = Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="nearest")


def sample(height: int = 60, width: int = 90) -> Masked:
    """A mask of blocks of 3 x 3 px, and an image that shows the class as its brightness."""
    classes = np.random.RandomState(0).randint(0, 5, (height // 3, width // 3)).astype(np.uint8)
    mask = np.kron(classes, np.ones((3, 3), np.uint8)).astype(np.uint8)
    return Masked(Image.fromarray(50 * mask).convert("RGB"), mask)


def words(**changes: Any) -> Augmentation:
    return Augmentation(**{"crop": "rescaled", "scale": (0.5, 2.0), "interpolation": "nearest", **changes})


def classes_shown(image: torch.Tensor) -> torch.Tensor:
    return ((image[0] * 0.5 + 0.5) * 255 / 50).round().long()


def test_image_and_mask_stay_together() -> None:
    transform = train_mask_transform(words(), (48, 40), GRAY, 3)
    sizes = set()
    for seed in range(20):
        with seeded(seed):
            image, mask = transform(sample())
        assert image.shape == (3, 48, 40)
        assert mask.shape == (48, 40)
        assert mask.dtype == torch.int64
        learned = mask != IGNORE
        assert torch.equal(classes_shown(image)[learned], mask[learned])
        assert (image[:, ~learned] == 0).all()  # padded with the mean color
        sizes.add(int(learned.sum()))
    assert max(sizes) == 48 * 40
    assert min(sizes) < 48 * 40


def test_the_same_seed_gives_the_same_sample() -> None:
    transform = train_mask_transform(words(jitter=(0.5, 0.5, 0.5, 0.25), interpolation="random"), (32, 32), GRAY, 3)
    results = []
    for seed in (1, 1, 2):
        with seeded(seed):
            results.append(transform(sample()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][0], results[2][0])


def test_a_flip_mirrors_both() -> None:
    sure, never = (train_mask_transform(words(flip=p, scale=(1, 1)), (60, 90), GRAY, 3) for p in (1.0, 0.0))
    (flipped, mirrored), (image, mask) = sure(sample()), never(sample())
    assert torch.equal(flipped.flip(-1), image)
    assert torch.equal(mirrored.flip(-1), mask)


def test_colors_change_the_image_alone() -> None:
    calm, loud = (
        train_mask_transform(words(flip=0, scale=(1, 1), jitter=jitter), (60, 90), GRAY, 3)
        for jitter in (None, (0.5, 0.5, 0.5, 0.25))
    )
    assert not torch.equal(calm(sample())[0], loud(sample())[0])
    assert torch.equal(calm(sample())[1], loud(sample())[1])


@pytest.mark.parametrize(
    ("size", "short", "expected"),
    [
        ((640, 480), 512, (512, 683)),
        ((480, 640), 256, (341, 256)),
        ((4000, 400), 512, (205, 2048)),
        ((5, 5), 0.1, (1, 1)),
    ],
)
def test_the_shorter_side_decides_unless_the_longer_gets_too_long(
    size: tuple[int, int], short: float, expected: tuple[int, int]
) -> None:
    assert fitted(Image.new("L", size), short) == expected


def striped(share: float) -> Array:
    """A mask of which class 1 fills a share at the right."""
    mask = np.zeros((20, 200), np.uint8)
    mask[:, round(200 * (1 - share)) :] = 1
    return mask


def test_a_crop_mixes_classes_where_it_can() -> None:
    random.seed(0)
    places = [mixed_place(striped(0.5), (20, 100)) for _ in range(50)]
    mixed = [25 < left < 75 for _, left in places]
    assert sum(mixed) >= 49  # half of all crops would be
    assert mixed_place(striped(0.0), (20, 100))[0] == 0  # one class only: whatever comes last


def test_what_is_ignored_is_no_class_of_a_crop() -> None:
    mask = striped(0.5)
    mask[:, :100] = IGNORE
    mask[:, 150:] = 2  # class 1 fills less than three quarters of what is counted from column 67 on
    random.seed(0)
    lefts = [mixed_place(mask, (20, 100))[1] for _ in range(30)]
    assert sum(left > 66 for left in lefts) >= 28


@pytest.mark.parametrize("short_side", [None, 30, 120])
def test_evaluation_resizes_the_image_and_leaves_the_truth(short_side: int | None) -> None:
    image, mask = eval_mask_transform(short_side, GRAY, 3)(sample())
    assert image.shape == ((3, 60, 90) if short_side is None else (3, short_side, short_side * 3 // 2))
    assert torch.equal(mask, torch.from_numpy(sample().mask.astype(np.int64)))


def test_grey_models_take_color_images() -> None:
    gray = Preprocessing(mean=(0.5,), std=(0.5,))
    assert eval_mask_transform(30, gray, 1)(sample())[0].shape == (1, 30, 45)
    assert train_mask_transform(words(), (32, 32), gray, 1)(sample())[0].shape == (1, 32, 32)
    with pytest.raises(DataError, match="3 channels"):
        eval_mask_transform(30, gray, 3)


def test_the_published_recipe_for_ade20k_is_understood() -> None:
    recipe = load_recipe("vision_lstm_ade20k", model="vil_tiny")
    image, mask = train_mask_transform(recipe.augmentation, (64, 64), Preprocessing(), 3)(sample())
    assert image.shape == (3, 64, 64)
    assert mask.shape == (64, 64)


@pytest.mark.parametrize(
    ("augmentation", "message"),
    [
        (Augmentation(), "crop = 'rescaled'"),
        (words(mixup=0.8, erasing=0.1), "no erasing and no mixup"),
        (words(randaugment="rand-m9"), "no randaugment"),
    ],
)
def test_what_masks_cannot_follow_is_an_error(augmentation: Augmentation, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train_mask_transform(augmentation, (32, 32), GRAY, 3)


def test_an_impossible_side_is_an_error() -> None:
    with pytest.raises(ConfigError, match="1 px or more"):
        eval_mask_transform(0, GRAY, 3)
