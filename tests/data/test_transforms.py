import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mixlab.core.errors import ConfigError, DataError
from mixlab.data import BatchMix, eval_transform, train_transform
from mixlab.data.seeding import seeded
from mixlab.models.config import Preprocessing
from mixlab.training.recipe import Augmentation
from tests.data.make import picture

GREY = Preprocessing(mean=(0.5,), std=(0.25,))
POLICIES: list[dict[str, Any]] = [{"randaugment": "rand-m9-mstd0.5-inc1"}, {"three_augment": True}]
EVERYTHING: dict[str, Any] = {
    "randaugment": "rand-m9-mstd0.5-inc1",
    "jitter": (0.3, 0.3, 0.3, 0.0),
    "erasing": 0.5,
    "interpolation": "random",
}


@pytest.mark.parametrize("crop", ["random_resized", "squash", "center", "padded", "rescaled"])
@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_crop_gives_the_size_for_grey_and_colour(channels: int, mode: str, crop: str) -> None:
    for policy in POLICIES:
        augmentation = Augmentation(**{**EVERYTHING, "randaugment": None, **policy, "crop": crop})
        transform = train_transform(augmentation, (40, 56), GREY if channels == 1 else Preprocessing(), channels)
        for number in range(5):
            tensor = transform(picture(number, (33, 57)).convert(mode))
            assert (tensor.shape, tensor.dtype) == ((channels, 40, 56), torch.float32)
            assert tensor.is_contiguous()


@pytest.mark.parametrize(
    "policy", ["rand-m9-mstd0.5-inc1", "rand-m10-n4-p1-inc1", "rand-m15-mmax15", "rand-m9-tweights"]
)
def test_randaugment_never_fails(policy: str) -> None:
    transform = train_transform(Augmentation(randaugment=policy), (24, 24), Preprocessing(), 3)
    for number in range(150):
        with seeded(number):
            assert transform(picture(number, (24, 24))).isfinite().all()


def test_a_misspelt_randaugment_is_an_error() -> None:
    with pytest.raises(ConfigError, match="rand-m9-mstd0.5-inc1'; got 'rand-9'"):  # noqa: RUF043
        train_transform(Augmentation(randaugment="rand-9"), (24, 24), Preprocessing(), 3)


def test_evaluation_equals_timms() -> None:
    from timm.data import create_transform

    ours = eval_transform((32, 32), Preprocessing(), 3, crop=0.875, interpolation="bicubic")
    theirs = create_transform((3, 32, 32), interpolation="bicubic", crop_pct=0.875)
    for size in ((50, 41), (41, 50), (36, 36), (7, 300)):
        image = picture(1, size)
        assert torch.allclose(ours(image), theirs(image), atol=1e-5)


def test_evaluation_at_a_size_that_is_not_square_keeps_proportions() -> None:
    image = Image.new("RGB", (100, 50))
    image.paste((255, 255, 255), (25, 0, 75, 50))  # the middle half
    tensor = eval_transform((40, 40), Preprocessing(), 3, crop=1.0, interpolation="nearest")(image)
    assert (tensor > 0).all()
    assert eval_transform((20, 60), Preprocessing(), 3)(image).shape == (3, 20, 60)


def test_normalisation_uses_mean_and_std() -> None:
    tensor = eval_transform((4, 4), GREY, 1)(Image.new("L", (4, 4), 255))
    assert torch.allclose(tensor, torch.full((1, 4, 4), 2.0))


def test_other_channel_counts_are_an_error() -> None:
    with pytest.raises(DataError, match="the model takes 4"):
        eval_transform((8, 8), Preprocessing(mean=(0.5,) * 4, std=(0.5,) * 4), 4)


def test_means_for_another_number_of_channels_are_an_error() -> None:
    with pytest.raises(DataError, match="3 means and 3 deviations for 1 channels"):
        eval_transform((8, 8), Preprocessing(), 1)


def test_a_factor_below_one_leaves_a_border() -> None:
    white = Image.new("L", (30, 30), 255)
    transform = train_transform(Augmentation(crop="rescaled", scale=(0.5, 0.5)), (20, 20), GREY, 1)
    assert int((transform(white) > 0).sum()) == 100


def test_jitter_happens_with_its_probability() -> None:
    image = picture(0, (16, 16))
    options: dict[str, Any] = {"crop": "squash", "flip": 0, "jitter": (0.5, 0.5, 0.5, 0.1)}
    never = train_transform(Augmentation(**options, jitter_probability=0.0), (16, 16), Preprocessing(), 3)
    always = train_transform(Augmentation(**options), (16, 16), Preprocessing(), 3)
    plain = eval_transform((16, 16), Preprocessing(), 3)(image)
    assert torch.equal(never(image), plain)
    assert not torch.equal(always(image), plain)


def test_flip_and_erasing_happen_only_if_asked_for() -> None:
    image = picture(0, (16, 16))
    plain = train_transform(Augmentation(crop="squash", flip=0), (16, 16), Preprocessing(), 3)
    assert torch.equal(plain(image), eval_transform((16, 16), Preprocessing(), 3)(image))
    flipped = train_transform(Augmentation(crop="squash", flip=1), (16, 16), Preprocessing(), 3)
    assert torch.equal(flipped(image), plain(image).flip(-1))
    erased = train_transform(Augmentation(crop="squash", flip=0, erasing=1), (16, 16), Preprocessing(), 3)
    assert not torch.equal(erased(image), plain(image))


def test_a_transform_is_a_function_of_the_global_seeds() -> None:
    transform = train_transform(Augmentation(**EVERYTHING), (24, 24), Preprocessing(), 3)
    drawn = []
    for seed in (1, 1, 2):
        with seeded(seed):
            drawn.append(transform(picture(0, (40, 40))))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_seeding_leaves_the_global_generators_as_they_were() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    with seeded(5):
        pass
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = draw()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    with seeded(7):
        draw()
    assert draw() == expected


def test_a_transform_can_be_sent_to_a_worker() -> None:
    transform = train_transform(Augmentation(**EVERYTHING), (24, 24), Preprocessing(), 3)
    assert pickle.loads(pickle.dumps(transform))(picture(0)).shape == (3, 24, 24)


# -- batches -------------------------------------------------------------------------------------

MIXES = [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0}]


@pytest.mark.parametrize("count", [1, 2, 5, 8])
@pytest.mark.parametrize("options", MIXES)
def test_mixing_agrees_with_its_targets(options: dict[str, float], count: int) -> None:
    """Images that are constant in their own class: the mean of the mixed image is the target."""
    labels = torch.arange(count)
    images = torch.eye(count)[:, :, None, None].expand(count, count, 32, 32).contiguous()
    mix = BatchMix(Augmentation(**options), count)  # type: ignore[arg-type]
    for seed in range(6):
        mixed, targets = mix(images, labels, seed)
        assert targets.shape == (count, count)
        assert torch.allclose(mixed.mean((2, 3)), targets, atol=1e-5)


def test_mixing_follows_from_the_seed_alone() -> None:
    images, labels = torch.randn(6, 3, 16, 16), torch.arange(6)
    mix = BatchMix(Augmentation(mixup=0.8, cutmix=1.0), 10)
    first = mix(images, labels, 3)
    np.random.seed(99)
    again = mix(images, labels, 3)
    other = mix(images, labels, 4)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[1], other[1])


def test_mixing_leaves_its_input_and_numpys_generator_alone() -> None:
    images = torch.randn(4, 3, 8, 8)
    before = images.clone()
    np.random.seed(3)
    expected = np.random.rand()
    np.random.seed(3)
    BatchMix(Augmentation(mixup=0.8), 4)(images, torch.arange(4), 2**62 + 1)
    assert np.random.rand() == expected
    assert torch.equal(images, before)


def test_without_mixing_targets_are_smoothed_labels() -> None:
    images, labels = torch.randn(2, 3, 8, 8), torch.tensor([1, 0])
    same, targets = BatchMix(Augmentation(label_smoothing=0.1), 4)(images, labels, 0)
    assert torch.equal(same, images)
    assert torch.allclose(targets, torch.tensor([[0.025, 0.925, 0.025, 0.025], [0.925, 0.025, 0.025, 0.025]]))
