"""Corruptions against their definitions, and their strength on real photos."""

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage  # type: ignore[import-untyped]
from sklearn.datasets import load_sample_images  # type: ignore[import-untyped]

from mixlab.core.errors import ConfigError, ImageError
from mixlab.evals.quality.corruptions import (
    OPERATIONS,
    SEVERITIES,
    alexnet_errors,
    choose,
    corrupt,
    parameters,
    severity_sets,
    short_name,
    standard,
)
from mixlab.ops.corruptions import (
    Array,
    brightness,
    displaced,
    elastic_transform,
    enlarge,
    motion_blur,
    saturate,
    streaks,
)
from mixlab.ops.weather import frost_texture, plasma

NAMES = tuple(OPERATIONS)

# Hendrycks and Dietterich's make_imagenet_c.py, severities 1 to 5
PUBLISHED: dict[str, list[Any]] = {
    "gaussian_noise": [0.08, 0.12, 0.18, 0.26, 0.38],
    "shot_noise": [60, 25, 12, 5, 3],
    "impulse_noise": [0.03, 0.06, 0.09, 0.17, 0.27],
    "defocus_blur": [(3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)],
    "glass_blur": [(0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)],
    "motion_blur": [(10, 3), (15, 5), (15, 8), (15, 12), (20, 15)],
    "zoom_blur": [(1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)],
    "snow": [
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ],
    "frost": [(1, 0.4, 1), (0.8, 0.6, 1), (0.7, 0.7, 1), (0.65, 0.7, 1), (0.6, 0.75, 1)],
    "fog": [(1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)],
    "brightness": [0.1, 0.2, 0.3, 0.4, 0.5],
    "contrast": [0.4, 0.3, 0.2, 0.1, 0.05],
    "elastic_transform": [
        (244, 2, 0.7, 0.1),
        (244, 2, 0.08, 0.2),
        (244, 0.05, 0.01, 0.02),
        (244, 0.07, 0.01, 0.02),
        (244, 0.12, 0.01, 0.02),
    ],
    "pixelate": [0.6, 0.5, 0.4, 0.3, 0.25],
    "jpeg_compression": [25, 18, 15, 10, 7],
    "speckle_noise": [0.15, 0.2, 0.35, 0.45, 0.6],
    "gaussian_blur": [1, 2, 3, 4, 6],
    "spatter": [
        (0.65, 0.3, 4, 0.69, 0.6, 0),
        (0.65, 0.3, 3, 0.68, 0.6, 0),
        (0.65, 0.3, 2, 0.68, 0.5, 0),
        (0.65, 0.3, 1, 0.65, 1.5, 1),
        (0.67, 0.4, 1, 0.65, 1.5, 1),
    ],
    "saturate": [(0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)],
}
ALEXNET = [88.6, 89.4, 92.3, 82.0, 82.6, 78.6, 79.8, 86.7, 82.7, 81.9, 56.5, 85.3, 64.6, 71.8, 60.7]  # %, rounded
TABLE_9 = [
    *("Gauss.", "Shot", "Impulse", "Defocus", "Glass", "Motion", "Zoom", "Snow", "Frost", "Fog", "Bright"),
    *("Contrast", "Elastic", "Pixel", "JPEG"),
]


@cache
def photos() -> tuple[Array, ...]:
    """Four crops of two real photos."""
    return tuple(
        photo[y : y + 192, x : x + 192] for photo in load_sample_images().images for y, x in ((0, 60), (200, 400))
    )


def noise_image(height: int, width: int, channels: int) -> Array:
    shape = (height, width) if channels == 1 else (height, width, channels)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


# -- the published facts -------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_severities_are_the_published_ones(name: str) -> None:
    rows = [tuple(parameters(name, severity).values()) for severity in SEVERITIES]
    wanted = [row if isinstance(row, tuple) else (row,) for row in PUBLISHED[name]]
    assert rows == wanted


def test_the_sets_for_smaller_images_are_the_published_ones() -> None:
    assert severity_sets() == {"imagenet": 224, "tiny_imagenet": 64, "cifar": 32}
    assert [parameters("gaussian_noise", one, "cifar")["deviation"] for one in SEVERITIES] == [
        0.04,
        0.06,
        0.08,
        0.09,
        0.1,
    ]
    assert [parameters("jpeg_compression", one, "tiny_imagenet")["quality"] for one in SEVERITIES] == [
        65,
        58,
        50,
        40,
        25,
    ]
    assert parameters("glass_blur", 5, "cifar") == {"deviation": 0.4, "reach": 1, "rounds": 2}


def test_the_fifteen_and_alexnets_errors_are_in_the_order_of_the_papers() -> None:
    assert [short_name(name) for name in standard()] == TABLE_9
    assert list(alexnet_errors()) == list(standard())
    assert [100 * error for error in alexnet_errors().values()] == pytest.approx(ALEXNET, abs=0.051)


# -- strength ------------------------------------------------------------------------------------


def difference(before: Array, after: Array) -> float:
    """Root mean square of the change of pixels."""
    return float(np.sqrt(np.mean((before.astype(float) - after) ** 2)))


def detail(image: Array) -> Array:
    own = image.astype(float)
    return own - ndimage.gaussian_filter(own, (2, 2, 0))


def aligned_difference(before: Array, after: Array) -> float:
    """The change of pixels after the shift by whole pixels that makes it least."""
    inner = (slice(8, -8), slice(8, -8))
    shifts = [(down, right) for down in range(6) for right in range(6)]
    return min(difference(np.roll(before, shift, (0, 1))[inner], after[inner]) for shift in shifts)


def foreign_detail(before: Array, after: Array) -> float:
    """The share of the fine structure that does not come from the photo: 1 minus the correlation."""
    return float(1 - np.corrcoef(detail(before).ravel(), detail(after).ravel())[0, 1])


# The change of pixels grows from severity to severity, but for these. Glass shifts everything, at severity 3 the most;
# frost and fog dim and brighten at once.
MEASURES = {"glass_blur": aligned_difference, "frost": foreign_detail, "fog": foreign_detail}


@cache
def strengths(name: str) -> list[float]:
    """Per severity the mean over photos and draws."""
    measure = MEASURES.get(name, difference)
    return [
        float(np.mean([measure(photo, corrupt(photo, name, severity, index=4 * draw + number))
                       for number, photo in enumerate(photos()) for draw in range(2)]))
        for severity in SEVERITIES
    ]  # fmt: skip


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("saturate", "elastic_transform")])
def test_every_severity_is_stronger_than_the_one_before_on_real_photos(name: str) -> None:
    found = strengths(name)
    assert found[0] > 0
    assert all(np.diff(found) > 0), found


def test_saturation_first_leaves_then_grows_and_each_direction_gets_stronger() -> None:
    """Published severities 1 and 2 take color away, 3 to 5 add it: they are ordered within a direction only."""
    found = strengths("saturate")
    assert 0 < found[0] < found[1]
    assert 0 < found[2] < found[3] < found[4]


@pytest.mark.parametrize("name", ["imagenet", "tiny_imagenet", "cifar"])
def test_the_local_stretch_of_elastic_transforms_grows(name: str) -> None:
    """Severities trade a large affine map for fine waves: pixels do not differ more and more. What grows is the local
    stretch: the gradient of where pixels come from, without the best affine map. Coordinates stand for the image."""
    side = severity_sets()[name]
    inner = slice(side // 4, -side // 4)
    found = []
    for severity in SEVERITIES:
        stretches = []
        for draw in range(4):
            ramps = np.stack([*np.mgrid[:side, :side]], axis=-1).astype(float)
            places = elastic_transform(
                ramps, np.random.default_rng(draw), **parameters("elastic_transform", severity, name)
            )
            places = places[inner, inner]
            grid = np.stack([*np.mgrid[: len(places), : len(places)], np.ones(places.shape[:2])], axis=-1).reshape(
                -1, 3
            )
            flat = places.reshape(-1, 2)
            rest = (flat - grid @ np.linalg.lstsq(grid, flat, rcond=None)[0]).reshape(places.shape)
            stretches.append(np.sqrt(np.mean(np.square(np.gradient(rest, axis=(0, 1))))))
        found.append(np.mean(stretches))
    assert all(np.diff(found) > 0), found
    photo = photos()[0]
    assert all(difference(photo, corrupt(photo, "elastic_transform", severity)) > 0 for severity in SEVERITIES)


# -- what holds for all of them ------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=6, deadline=None)
def test_size_and_type_stay_for_grey_and_oblong_images(name: str, data: st.DataObject) -> None:
    height, width = data.draw(st.integers(32, 70)), data.draw(st.integers(32, 70))
    image = noise_image(height, width, data.draw(st.sampled_from([1, 3])))
    kept = image.copy()
    severity = data.draw(st.sampled_from(SEVERITIES))
    found = corrupt(image, name, severity, severity_set=data.draw(st.sampled_from(sorted(severity_sets()))))
    assert found.shape == image.shape
    assert found.dtype == np.uint8
    assert np.array_equal(image, kept)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("level", [0, 255])
def test_black_and_white_images_have_no_trouble(name: str, level: int) -> None:
    for channels in (1, 3):
        image = np.full_like(noise_image(40, 33, channels), level)
        for severity in SEVERITIES:
            assert corrupt(image, name, severity).shape == image.shape


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_image_and_another_one_does_not(name: str) -> None:
    photo = photos()[1][:64, :96]
    first = corrupt(photo, name, 3, seed=1, index=5)
    assert np.array_equal(first, corrupt(photo, name, 3, seed=1, index=5))
    fixed = {
        "defocus_blur",
        "zoom_blur",
        "brightness",
        "contrast",
        "pixelate",
        "jpeg_compression",
        "gaussian_blur",
        "saturate",
    }
    for other in (corrupt(photo, name, 3, seed=2, index=5), corrupt(photo, name, 3, seed=1, index=6)):
        assert np.array_equal(first, other) == (name in fixed)


def test_grey_photos_are_changed_by_all_but_saturation() -> None:
    gray = np.rint(photos()[0].mean(-1)).astype(np.uint8)
    same = {name for name in NAMES if np.array_equal(gray, corrupt(gray, name, 4))}
    assert same == {"saturate"}


def test_unfit_images_and_names_are_explained() -> None:
    with pytest.raises(ImageError, match="32 or more"):
        corrupt(noise_image(31, 64, 3), "fog", 1)
    with pytest.raises(ImageError, match="uint8"):
        corrupt(np.zeros((64, 64, 3)), "fog", 1)
    with pytest.raises(ConfigError, match="gaussian_noise"):
        corrupt(noise_image(64, 64, 3), "gausian_noise", 1)
    with pytest.raises(ConfigError, match="from 1 to 5"):
        corrupt(noise_image(64, 64, 3), "fog", 6)


def test_groups_and_words_choose_corruptions() -> None:
    assert choose(["standard"]) == NAMES[:15]
    assert choose(["all"]) == NAMES
    assert choose(["fog", "noise"]) == ("gaussian_noise", "shot_noise", "impulse_noise", "fog")
    assert choose(["none"]) == ()
    with pytest.raises(ConfigError, match="weather"):
        choose(["wether"])


# -- single operations against their definitions -------------------------------------------------


@pytest.mark.parametrize(("height", "width", "reach"), [(40, 33, 1), (32, 47, 2), (50, 50, 4)])
def test_glass_displaces_as_the_visit_of_one_pixel_after_the_other(height: int, width: int, reach: int) -> None:
    values = np.arange(height * width).reshape(height, width)
    steps = np.random.default_rng(3).integers(-reach, reach, size=(2, (height - 2 * reach) * (width - 2 * reach)))
    steps = steps.reshape(2, height - 2 * reach, width - 2 * reach)
    for row in range(height - reach, reach, -1):
        for column in range(width - reach, reach, -1):
            down, right = steps[:, row - reach - 1, column - reach - 1]
            values[row, column] = values[row + down, column + right]
    found = displaced(height, width, reach, np.random.default_rng(3))
    assert np.array_equal(found.reshape(height, width), values)


@pytest.mark.parametrize(("factor", "shape"), [(1.0, (40, 33)), (1.07, (45, 64)), (2.5, (64, 51)), (4.5, (50, 50))])
def test_enlargements_are_those_of_scipy(factor: float, shape: tuple[int, int]) -> None:
    image = np.random.default_rng(0).random((*shape, 2))
    inner = [int(np.ceil(side / factor)) for side in shape]
    top, left = ((side - short) // 2 for side, short in zip(shape, inner, strict=True))
    whole = ndimage.zoom(image[top : top + inner[0], left : left + inner[1]], (factor, factor, 1), order=1)
    top, left = ((large - side) // 2 for large, side in zip(whole.shape, shape, strict=False))
    assert np.allclose(enlarge(image, factor), whole[top : top + shape[0], left : left + shape[1]])


def test_streaks_are_half_a_gaussian_in_one_direction() -> None:
    image = np.zeros((33, 65, 1))
    image[16, 50] = 1
    taps = np.exp(-(np.arange(21) ** 2) / (2 * 3**2))
    level = streaks(image, 10, 3, 0)[16, :, 0]
    assert level[30:51][::-1] == pytest.approx(taps / taps.sum())
    assert level[51:].max() == 0
    assert streaks(image, 10, 3, 90)[:, 50, 0][6:17][::-1] == pytest.approx(taps[:11] / taps.sum())
    assert np.allclose(motion_blur(np.full((40, 40, 1), 0.3), np.random.default_rng(0), radius=10, deviation=3), 0.3)


def test_brightness_and_saturation_are_those_of_hsv() -> None:
    import colorsys

    random = np.random.default_rng(0)
    colors = random.random((4, 5, 3))
    brighter = brightness(colors, random, shift=0.3)
    stronger = saturate(colors, random, factor=2, shift=0.1)
    for place in np.ndindex(4, 5):
        hue, saturation, value = colorsys.rgb_to_hsv(*colors[place])
        assert brighter[place] == pytest.approx(colorsys.hsv_to_rgb(hue, saturation, min(value + 0.3, 1)))
        assert stronger[place] == pytest.approx(colorsys.hsv_to_rgb(hue, min(2 * saturation + 0.1, 1), value))


def test_noise_has_the_deviation_that_is_asked_for() -> None:
    gray = np.full((200, 200), 128, dtype=np.uint8)
    assert corrupt(gray, "gaussian_noise", 1).std() / 255 == pytest.approx(0.08, rel=0.05)
    assert corrupt(gray, "shot_noise", 1).std() / 255 == pytest.approx(np.sqrt(128 / 255 / 60), rel=0.05)
    assert corrupt(gray, "speckle_noise", 2).std() / 128 == pytest.approx(0.2, rel=0.05)
    hit = corrupt(gray, "impulse_noise", 5)
    assert np.isin(hit, [0, 255]).mean() == pytest.approx(0.27, abs=0.01)


def test_plasma_and_frost_span_their_range() -> None:
    heights = plasma(64, 1.7, np.random.default_rng(0))
    assert (heights.min(), heights.max()) == (0, 1)
    ice = frost_texture(96, 160, 1.0, np.random.default_rng(0))
    assert ice.shape == (96, 160)
    assert 0 <= ice.min() < 0.2
    assert 0.8 < ice.max() <= 1
    assert ice.mean() == pytest.approx(0.48, abs=0.03)
