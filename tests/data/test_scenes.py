import hashlib
import pickle
from collections import Counter

import numpy as np
import pytest
import torch

from mixlab.core.errors import DataError
from mixlab.data.digits import assignment, load
from mixlab.data.scenes import make_scene, open_scene_masks, open_scene_objects, sources, without_hidden

SOME = range(60)


def test_both_views_show_the_same_scene() -> None:
    masks, objects = open_scene_masks("val"), open_scene_objects("val")
    assert len(masks) == len(objects) == 200
    for index in SOME:
        masked, (image, found) = masks.read(index), objects.read(index)
        assert masked.image.tobytes() == image.tobytes()
        assert found.masks is not None
        classes = (found.masks.long() * (found.labels + 1)[:, None, None]).sum(0)
        assert np.array_equal(masked.mask, classes.numpy())
        assert masks.class_names[1:] == objects.class_names


def test_masks_do_not_overlap_and_boxes_are_tight() -> None:
    data = open_scene_objects("train")
    for index in SOME:
        objects = data.read(index).objects
        assert objects.masks is not None
        assert objects.masks.sum(0).le(1).all()
        assert objects.area.tolist() == objects.masks.flatten(1).sum(1).tolist()
        for (left, top, right, bottom), mask in zip(objects.boxes.long().tolist(), objects.masks, strict=True):
            assert mask[top:bottom, left:right].sum() == mask.sum() > 0
            for edge in (mask[top], mask[bottom - 1], mask[:, left], mask[:, right - 1]):
                assert edge.any()


def test_a_scene_is_the_same_in_any_order_and_differs_from_all_others() -> None:
    data = open_scene_objects("train")
    forward = [data.read(index).image.tobytes() for index in SOME]
    assert [data.read(index).image.tobytes() for index in reversed(SOME)] == forward[::-1]
    others = [open_scene_objects(split).read(index).image.tobytes() for split in ("val", "test") for index in SOME]
    assert len({*forward, *others}) == 3 * len(SOME)


def test_the_global_generators_play_no_part() -> None:
    data = open_scene_masks("test")
    first = data.read(3)
    np.random.seed(1)
    torch.manual_seed(1)
    state = np.random.get_state()[1].copy()  # type: ignore[index]
    assert np.array_equal(data.read(3).mask, first.mask)
    assert np.array_equal(np.random.get_state()[1], state)  # type: ignore[index]


def test_masks_never_change() -> None:
    masks = [open_scene_masks("test").read(index).mask for index in range(10)]
    assert hashlib.sha256(b"".join(mask.tobytes() for mask in masks)).hexdigest()[:16] == "9a247ea16d92fb7c"


def test_splits_draw_from_disjoint_digits() -> None:
    pixels, _ = load()
    for number, split in enumerate(("train", "val", "test")):
        glyphs, classes = sources(split)
        assert len(glyphs) == len(classes) == (assignment() == number).sum()
        first = np.flatnonzero(assignment() == number)[0]
        assert np.array_equal(np.asarray(glyphs[0])[2:-2, 2:-2], pixels[first])


def test_about_one_scene_in_twenty_is_empty_and_all_classes_occur() -> None:
    data = open_scene_objects("train")
    found = [data.read(index).objects.labels.tolist() for index in range(600)]
    assert 12 <= sum(not labels for labels in found) <= 50
    assert max(map(len, found)) == 5
    counts = Counter(label for labels in found for label in labels)
    assert sorted(counts) == list(range(10))
    assert max(counts.values()) < 2 * min(counts.values())


def test_digits_are_a_fifth_to_half_of_the_canvas_high() -> None:
    boxes = torch.cat([open_scene_objects("val").read(index).objects.boxes for index in range(100)])
    heights = (boxes[:, 3] - boxes[:, 1]) / 96
    assert heights.quantile(0.1) > 0.2
    assert heights.max() < 0.5


def test_some_digits_are_partly_hidden() -> None:
    data = open_scene_objects("train")
    overlaps = 0
    for index in SOME:
        objects = data.read(index).objects
        for number, box in enumerate(objects.boxes.long().tolist()):
            others = [mask for other, mask in enumerate(objects.masks) if other != number]  # type: ignore[arg-type]
            overlaps += any(mask[box[1] : box[3], box[0] : box[2]].any() for mask in others)
    assert overlaps > 10


def test_a_digit_that_is_hidden_altogether_is_no_object() -> None:
    scene = make_scene("train", 3, 96)
    assert len(scene.labels) > 2
    owner = np.where(scene.owner == 1, -1, scene.owner)
    kept = without_hidden(scene._replace(owner=owner))
    assert kept.labels.tolist() == [label for number, label in enumerate(scene.labels) if number != 1]
    assert np.array_equal(kept.owner == 1, scene.owner == 2)


@pytest.mark.parametrize("side", [48, 131, 224])
def test_other_sizes(side: int) -> None:
    data = open_scene_objects("train", side=side, scenes=5)
    assert len(data) == 5
    for index in range(5):
        assert data.read(index).image.size == (side, side)


def test_wrong_settings_and_indices_are_errors() -> None:
    with pytest.raises(DataError, match="Unknown split 'trian'"):
        open_scene_masks("trian")
    with pytest.raises(DataError, match="48 px or more"):
        open_scene_objects("train", side=16)
    with pytest.raises(IndexError):
        open_scene_masks("val").read(200)


def test_scenes_can_be_sent_to_a_worker() -> None:
    data = open_scene_masks("val")
    assert np.array_equal(pickle.loads(pickle.dumps(data)).read(7).mask, data.read(7).mask)
    assert data.name(7) == "digit-scenes/val[7]"
