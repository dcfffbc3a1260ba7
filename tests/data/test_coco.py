import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mixlab.core.errors import DataError, UnreadableImage
from mixlab.data.coco import CocoObjects, coco_splits, is_coco, object_problems, open_coco
from mixlab.data.outlines import mask_api
from tests.data.make import picture, write

WIDTH, HEIGHT = 20, 16
TRIANGLE = [[2.0, 3.0, 12.3, 3.0, 2.0, 13.7]]


def thing(image: int = 1, **changes: Any) -> dict[str, Any]:
    """An annotation of a category with id 7."""
    box = {"bbox": [2.0, 3.0, 10.5, 11.0], "segmentation": TRIANGLE, "area": 55.5, "iscrowd": 0}
    return {"image_id": image, "category_id": 7, **box, **changes}


def content(things: list[dict[str, Any]], images: int = 2) -> dict[str, Any]:
    return {
        "images": [
            {"id": number, "file_name": f"{number}.png", "width": WIDTH, "height": HEIGHT}
            for number in range(1, images + 1)
        ],
        "annotations": [{"id": number, **entry} for number, entry in enumerate(things)],
        "categories": [{"id": 90, "name": "zebra"}, {"id": 7, "name": "ant"}],
    }


def dataset(root: Path, things: list[dict[str, Any]], **changes: Any) -> CocoObjects:
    """ROOT/train.json with ROOT/train/."""
    listed = content(things) | changes
    for image in listed["images"]:
        write(root / "train" / image["file_name"], picture(image["id"], (WIDTH, HEIGHT)))
    (root / "train.json").write_text(json.dumps(listed))
    return open_coco(root, "train")


def problems(data: CocoObjects) -> str:
    return "\n".join(object_problems(data))


def test_an_object_is_read_as_it_was_written(tmp_path: Path) -> None:
    data = dataset(tmp_path, [thing()])
    image, objects = data.read(0)
    assert image.tobytes() == picture(1, (WIDTH, HEIGHT)).tobytes()
    assert objects.boxes.tolist() == [[2.0, 3.0, 12.5, 14.0]]
    assert (objects.labels.tolist(), objects.crowd.tolist(), objects.area.tolist()) == ([0], [False], [55.5])
    assert objects.masks is not None
    assert (objects.masks.shape, objects.masks.dtype) == ((1, HEIGHT, WIDTH), torch.bool)
    assert data.name(0) == str(tmp_path / "train" / "1.png")


def test_categories_are_numbered_in_the_order_of_their_ids(tmp_path: Path) -> None:
    data = dataset(tmp_path, [thing(category_id=90), thing()])
    assert data.class_names == ("ant", "zebra")
    assert data.read(0).objects.labels.tolist() == [1, 0]


def test_objects_belong_to_their_images_whatever_their_order(tmp_path: Path) -> None:
    data = dataset(
        tmp_path, [thing(3, area=3), thing(1, area=1), thing(3, area=4)], **{"images": content([], 3)["images"]}
    )
    assert [data.read(index).objects.area.tolist() for index in range(3)] == [[1], [], [3, 4]]


def test_an_image_without_objects_has_empty_tensors(tmp_path: Path) -> None:
    objects = dataset(tmp_path, [thing()]).read(1).objects
    assert (len(objects), objects.boxes.shape, objects.labels.dtype) == (0, (0, 4), torch.int64)
    assert objects.masks is not None
    assert objects.masks.shape == (0, HEIGHT, WIDTH)


def test_without_outlines_there_are_no_masks(tmp_path: Path) -> None:
    data = dataset(tmp_path, [thing(segmentation=[])])
    assert not data.has_masks
    assert data.read(0).objects.masks is None


# -- outlines ------------------------------------------------------------------------------------


def test_polygons_and_both_run_lengths_give_the_same_mask(tmp_path: Path) -> None:
    api = mask_api()
    drawn = np.asarray(api.decode(api.merge(api.frPyObjects(TRIANGLE, HEIGHT, WIDTH))))
    packed = api.encode(np.asfortranarray(drawn))
    flat = np.concatenate(([0], drawn.T.ravel(), [1 - drawn[-1, -1]]))  # column by column, from a 0
    counts = np.diff(np.concatenate(([0], np.flatnonzero(np.diff(flat))))).tolist()
    data = dataset(
        tmp_path,
        [
            thing(),
            thing(segmentation={"size": [HEIGHT, WIDTH], "counts": packed["counts"].decode()}),
            thing(segmentation={"size": [HEIGHT, WIDTH], "counts": counts}, iscrowd=1),
        ],
    )
    objects = data.read(0).objects
    assert objects.masks is not None
    assert 40 < drawn.sum() < 70
    for mask in objects.masks:
        assert np.array_equal(mask.numpy(), drawn)
    assert objects.crowd.tolist() == [False, False, True]


def test_the_box_is_the_mask_where_an_outline_is_missing_or_broken(tmp_path: Path) -> None:
    broken: list[Any] = [
        [],
        [[1.0, 2.0, 3.0, 4.0]],
        [["a"] * 6],
        {"size": [HEIGHT, WIDTH], "counts": [5, 3]},
        {"size": [HEIGHT, WIDTH], "counts": "nonsense"},
        {"size": [WIDTH, HEIGHT], "counts": [WIDTH * HEIGHT]},
        {"counts": [WIDTH * HEIGHT]},
    ]
    data = dataset(tmp_path, [thing(), *(thing(segmentation=outline) for outline in broken)])
    masks = data.read(0).objects.masks
    assert masks is not None
    for mask in masks[1:]:
        assert mask.sum() == 11 * 11  # 2 to 12.5 across, 3 to 14 down
    assert f"{len(broken)} objects" in problems(data)
    assert "Their box is taken for their mask" in problems(data)


def test_a_missing_area_is_that_of_the_mask(tmp_path: Path) -> None:
    objects = dataset(tmp_path, [thing(area=None)]).read(0).objects
    assert objects.masks is not None
    assert objects.area.item() == objects.masks.sum()


# -- layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "images"),
    [
        ("annotations/instances_train2017.json", "train2017"),
        ("annotations/instances_train2017.json", "images/train2017"),
        ("train.json", "train"),
        ("train.json", "images"),
        ("train.json", "images/train"),
        ("train.json", "."),
    ],
)
def test_both_layouts_are_found(tmp_path: Path, file: str, images: str) -> None:
    for number in (1, 2):
        write(tmp_path / images / f"{number}.png", picture(number, (WIDTH, HEIGHT)))
    place = tmp_path / file
    place.parent.mkdir(exist_ok=True)
    place.write_text(json.dumps(content([thing()])))
    assert is_coco(tmp_path)
    assert coco_splits(tmp_path) == ["train"]
    assert len(open_coco(tmp_path, "train").read(0).objects) == 1


def test_another_folder_is_no_coco_and_a_missing_split_says_what_is_there(tmp_path: Path) -> None:
    assert not is_coco(tmp_path)
    dataset(tmp_path, [thing()])
    with pytest.raises(DataError, match=r"no val split .* it has: train"):
        open_coco(tmp_path, "val")


def test_images_elsewhere_say_where_they_were_looked_for(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text(json.dumps(content([thing()])))
    with pytest.raises(DataError, match=r"no 1\.png in .*train"):
        open_coco(tmp_path, "train")


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not a JSON file"),
        ("[1]", "no list of 'images'"),
        (json.dumps({"images": [], "annotations": []}), "no list of 'categories'"),
        (json.dumps(content([thing()]) | {"images": []}), "lists no images"),
        (
            json.dumps(content([thing()]) | {"images": content([])["images"] * 2}),
            "more than one image with the same id",
        ),
        (json.dumps(content([thing()]) | {"categories": [{"id": 7, "name": "a"}] * 2}), "more than one category"),
        (json.dumps(content([thing()]) | {"categories": []}), "one category or more"),
        (json.dumps(content([thing(category_id=8)])), "does not list: 8"),
        (json.dumps(content([thing()]) | {"images": [{"id": 1}]}), "no usable 'file_name'"),
        (json.dumps(content([thing(image_id=[1])])), "no usable 'image_id'"),
        (json.dumps(content([thing(bbox=None)])), "None of the 1 objects"),
    ],
)
def test_an_unusable_file_is_an_error_that_says_why(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "train.json").write_text(text)
    with pytest.raises(DataError, match=said):
        open_coco(tmp_path, "train")


def test_boxes_without_size_are_left_out_and_counted(tmp_path: Path) -> None:
    bad: list[Any] = [[3, 3, 0, 5], [3, 3, 5, -1], [3, 3, 5], None, [3, 3, "5", 5], [3, 3, float("nan"), 5]]
    data = dataset(tmp_path, [*(thing(bbox=box) for box in bad), thing()])
    assert len(data.read(0).objects) == 1
    assert "6 objects" in problems(data)
    assert "no box with a width and a height above 0: 1.png" in problems(data)


def test_boxes_are_cut_at_the_border_and_left_out_beyond_it(tmp_path: Path) -> None:
    boxes = [[-3, -4, 10, 10], [15, 10, 100, 100], [WIDTH, 2, 5, 5], [0, 0, WIDTH + 0.5, HEIGHT]]
    data = dataset(tmp_path, [thing(bbox=box) for box in boxes])
    assert data.read(0).objects.boxes.tolist() == [[0, 0, 7, 6], [15, 10, 20, 16], [0, 0, WIDTH, HEIGHT]]
    assert "1 objects" in next(line for line in object_problems(data) if "outside their image" in line)
    assert "2 objects" in next(line for line in object_problems(data) if "over the border" in line)


def test_missing_images_are_reported_and_unreadable(tmp_path: Path) -> None:
    data = dataset(tmp_path, [thing()])
    (tmp_path / "train" / "2.png").unlink()
    assert "1 of the 2 images" in problems(data)
    with pytest.raises(UnreadableImage, match=r"2\.png"):
        data.read(1)


def test_an_image_of_another_size_is_unreadable(tmp_path: Path) -> None:
    data = dataset(tmp_path, [thing()])
    write(tmp_path / "train" / "1.png", picture(1, (WIDTH, HEIGHT + 1)))
    with pytest.raises(UnreadableImage, match="20 x 17 pixels, but its annotations are for 20 x 16"):
        data.read(0)


def test_a_file_without_sizes_is_taken_by_the_images(tmp_path: Path) -> None:
    images = [{"id": 1, "file_name": "1.png"}]
    data = dataset(tmp_path, [thing(bbox=[5, 5, 99, 99])], images=images)
    assert data.read(0).objects.boxes.tolist() == [[5, 5, WIDTH, HEIGHT]]


def test_strays_repeated_ids_and_absent_classes_are_reported(tmp_path: Path) -> None:
    data = dataset(tmp_path, [thing(), thing(id=0), thing(image_id=99)])
    found = problems(data)
    assert "1 objects" in found
    assert "images that it does not list" in found
    assert "the id of another one" in found
    assert "have no objects: zebra" in found
    assert "have no objects: 2.png. They train as negatives" in found


def test_a_good_file_has_no_problems(tmp_path: Path) -> None:
    data = dataset(tmp_path, [thing(1), thing(2, category_id=90)])
    assert problems(data) == ""


# -- orientation ---------------------------------------------------------------------------------


def turned(path: Path, orientation: int, size: tuple[int, int]) -> Image.Image:
    """An image stored with a white top left corner and an EXIF orientation."""
    image = Image.new("RGB", size)
    image.paste((255, 255, 255), (0, 0, 4, 4))
    exif = image.getexif()
    exif[0x0112] = orientation
    image.save(path, exif=exif)
    return image


@pytest.mark.parametrize("orientation", range(1, 9))
def test_boxes_refer_to_the_image_as_stored(tmp_path: Path, orientation: int) -> None:
    data = dataset(tmp_path, [thing()])
    stored = turned(tmp_path / "train" / "1.png", orientation, (WIDTH, HEIGHT))
    assert data.read(0).image.tobytes() == stored.tobytes()


def test_an_image_that_was_annotated_upright_is_turned(tmp_path: Path) -> None:
    data = dataset(tmp_path, [thing()])
    turned(tmp_path / "train" / "1.png", 6, (HEIGHT, WIDTH))
    image = data.read(0).image
    assert image.size == (WIDTH, HEIGHT)
    assert image.getpixel((WIDTH - 1, 0)) == (255, 255, 255)


def test_a_dataset_can_be_sent_to_a_worker(tmp_path: Path) -> None:
    data = dataset(tmp_path, [thing()])
    copy = pickle.loads(pickle.dumps(data))
    assert torch.equal(copy.read(0).objects.boxes, data.read(0).objects.boxes)
