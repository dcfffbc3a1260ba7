import itertools

import numpy as np
import pytest
import torch
from PIL import Image

from mixlab.data.dense import IGNORE
from mixlab.data.scenes import open_scene_masks, open_scene_objects
from mixlab.findings.drawing import color, draw_mask, draw_objects, free_place, ink, meets
from tests.data.make import Array

GRAY = (128, 128, 128)
NAMES = ("ant", "bee", "cat")


def gray(width: int = 640, height: int = 480) -> Image.Image:
    return Image.new("RGB", (width, height), GRAY)


def pixels(image: Image.Image) -> Array:
    return np.asarray(image).astype(int)


def square(width: int, height: int) -> Array:
    """One mask, (1, H, W), from a quarter to three quarters."""
    mask = np.zeros((1, height, width), dtype=bool)
    mask[0, height // 4 : 3 * height // 4, width // 4 : 3 * width // 4] = True
    return mask


def test_a_box_is_drawn_in_the_color_of_its_class() -> None:
    drawn = pixels(draw_objects(gray(), [[100, 200, 300, 400]], [2], class_names=NAMES))
    for x, y in ((100, 300), (299, 300), (200, 399), (299, 200)):
        assert tuple(drawn[y, x]) == color(2)
    assert tuple(drawn[300, 200]) == GRAY


def test_a_mask_tints_its_pixels_and_no_others() -> None:
    mask = square(640, 480)
    plain = pixels(draw_objects(gray(), [[160, 120, 480, 360]], [0], class_names=NAMES))
    drawn = pixels(draw_objects(gray(), [[160, 120, 480, 360]], [0], masks=mask, class_names=NAMES))
    assert np.array_equal(drawn[~mask[0]], plain[~mask[0]])
    middle = drawn[240, 320]
    assert all(min(GRAY[c], color(0)[c]) < middle[c] < max(GRAY[c], color(0)[c]) for c in range(3))


def test_the_original_is_left_as_it_was() -> None:
    image = gray()
    draw_objects(image, [[10, 10, 90, 90]], [1], [0.5], square(640, 480), NAMES)
    draw_mask(image, square(640, 480)[0].astype(np.uint8), NAMES)
    assert image.tobytes() == gray().tobytes()


@pytest.mark.parametrize("size", [(32, 32), (96, 40), (7, 300), (640, 480), (1333, 800)])
def test_small_images_are_enlarged_and_large_ones_keep_their_size(size: tuple[int, int]) -> None:
    boxes = [[0.0, 0, *size], [-5, -5, 3, 3], [size[0] - 1, size[1] - 1, size[0] + 9, size[1] + 9]]
    drawn = draw_objects(gray(*size), boxes, [0, 1, 2], [0.9, 0.5, 0.1], None, ["a rather long name for it"] * 3)
    assert drawn.width % size[0] == drawn.height % size[1] == 0
    assert drawn.width * size[1] == drawn.height * size[0]
    assert max(drawn.size) >= 320
    assert drawn.size == size or max(size) < 320


@pytest.mark.parametrize("box", [(0, 0, 50, 50), (600, 0, 640, 480), (0, 440, 20, 480), (0, 0, 640, 480)])
def test_words_stay_inside_the_image(box: tuple[int, int, int, int]) -> None:
    left, top, right, bottom = free_place(gray(), "traffic light: 0.53", box, [])
    assert 0 <= left < right <= 640
    assert 0 <= top < bottom <= 480


def test_words_avoid_each_other() -> None:
    places: list[tuple[int, int, int, int]] = []
    for shift in range(4):
        places.append(free_place(gray(), "ant: 0.53", (200 + shift, 200, 320, 300), places))
    assert not any(meets(one, other) for one, other in itertools.combinations(places, 2))


def test_nothing_found_draws_nothing() -> None:
    empty = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), torch.zeros(0), torch.zeros(0, 480, 640).bool()
    assert draw_objects(gray(), *empty, NAMES).tobytes() == gray().tobytes()


def test_tensors_and_arrays_and_lists_draw_the_same() -> None:
    boxes, labels, scores = [[10.0, 20, 200, 300], [50, 60, 400, 420]], [0, 2], [0.25, 0.75]
    masks = np.concatenate([square(640, 480)] * 2)
    listed = draw_objects(gray(), boxes, labels, scores, masks, NAMES)
    tensors = torch.tensor(boxes), torch.tensor(labels), torch.tensor(scores), torch.from_numpy(masks)
    assert draw_objects(gray(), *tensors, NAMES).tobytes() == listed.tobytes()


def test_a_class_without_a_name_is_numbered() -> None:
    assert draw_objects(gray(), [[100, 100, 200, 200]], [9]).tobytes() != gray().tobytes()


def test_classes_get_distinct_colors_that_never_change() -> None:
    colors = [color(number) for number in range(150)]
    assert len(set(colors)) == 150
    assert colors[:2] == [(230, 159, 0), (86, 180, 233)]
    apart = [np.abs(np.subtract(one, other)).sum() for one, other in itertools.combinations(colors[:20], 2)]
    assert min(apart) > 40


def test_words_contrast_with_their_paper() -> None:
    for number in range(150):
        paper = color(number)
        gap = np.dot(np.subtract(ink(paper), paper), (0.299, 0.587, 0.114))
        assert abs(gap) > 100


def test_a_mask_gets_a_legend_of_the_classes_that_are_there() -> None:
    mask = np.full((480, 640), IGNORE, dtype=np.uint8)
    mask[:100] = 1
    drawn = draw_mask(gray(), mask, NAMES)
    assert drawn.width == 640
    assert drawn.height > 480
    legend = {tuple(pixel) for pixel in pixels(drawn)[480:].reshape(-1, 3).tolist()}
    assert color(1) in legend
    assert color(2) not in legend
    assert (pixels(drawn)[200:480] == GRAY).all()  # what is to be ignored


def test_background_is_not_painted_and_needs_no_legend() -> None:
    drawn = draw_mask(gray(), np.zeros((480, 640), dtype=np.uint8), ("background", "0"))
    assert drawn.tobytes() == gray().tobytes()


def test_a_long_legend_takes_more_lines() -> None:
    mask = (np.arange(640)[None].repeat(480, 0) // 20).astype(np.uint8)
    names = [f"a class with number {number}" for number in range(32)]
    few = draw_mask(gray(), np.minimum(mask, 1), names)
    assert draw_mask(gray(), mask, names).height > few.height + 200


def test_scenes_can_be_drawn() -> None:
    objects, masks = open_scene_objects("val"), open_scene_masks("val")
    for index in range(3):
        image, found = objects.read(index)
        drawn = draw_objects(image, found.boxes, found.labels, None, found.masks, objects.class_names)
        assert drawn.size == (384, 384)
        assert draw_mask(image, masks.read(index).mask, masks.class_names).width == 384
