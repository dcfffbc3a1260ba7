from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mixlab.core.errors import DataError, UnreadableImage
from mixlab.data.masks import (
    CITYSCAPES,
    UnreadableMask,
    is_masks,
    mask_problems,
    mask_splits,
    open_ade20k,
    open_cityscapes,
    open_mask_data,
    open_masks,
)
from tests.data.make import Array, picture, write

SIZE = (12, 10)  # width, height


def labels(*values: int, size: tuple[int, int] = SIZE) -> Array:
    """A mask of these values in stripes."""
    return np.resize(np.repeat(np.array(values), size[0]), (size[1], size[0])).astype(np.uint8)


def folder(root: Path, masks: dict[str, Array], classes: str = "sky\nsea\nland\n", split: str = "train") -> Path:
    for number, (name, mask) in enumerate(masks.items()):
        write(root / "images" / split / f"{name}.jpg", picture(number, SIZE))
        write(root / "masks" / split / f"{name}.png", Image.fromarray(mask))
    (root / "classes.txt").write_text(classes)
    return root


def ade20k(root: Path, mask: Array) -> Path:
    for split in ("training", "validation"):
        write(root / "images" / split / "ADE_0001.jpg", picture(1, SIZE))
        write(root / "annotations" / split / "ADE_0001.png", Image.fromarray(mask))
    return root


# -- folders -------------------------------------------------------------------------------------


def test_a_folder_has_splits_classes_and_masks_as_they_are(tmp_path: Path) -> None:
    folder(tmp_path, {"a": labels(0, 1), "deep/b": labels(2, 255)})
    folder(tmp_path, {"c": labels(1)}, split="val")
    assert is_masks(tmp_path)
    assert mask_splits(tmp_path) == ["train", "val"]
    data = open_mask_data(tmp_path, "train")
    assert len(data) == 2
    assert data.class_names == ("sky", "sea", "land")
    assert data.name(1).endswith("b.jpg")
    image, mask = data.read(1)
    assert image.size == SIZE
    assert mask.dtype == np.uint8
    assert np.array_equal(mask, labels(2, 255))


@pytest.mark.parametrize("mode", ["P", "L", "I;16"])
def test_masks_are_numbers_in_any_mode(tmp_path: Path, mode: str) -> None:
    folder(tmp_path, {"a": labels(0, 1, 2)})
    if mode == "P":
        mask = Image.fromarray(labels(0, 1, 2)).convert("P")
        mask.putdata(labels(0, 1, 2).ravel().tolist())
        mask.putpalette([200, 10, 10, 10, 200, 10, 10, 10, 200])
    else:
        mask = Image.fromarray(labels(0, 1, 2).astype(np.uint8 if mode == "L" else np.uint16))
    mask.save(tmp_path / "masks" / "train" / "a.png")
    assert np.array_equal(open_masks(tmp_path, "train").read(0).mask, labels(0, 1, 2))


def test_a_photo_that_lies_on_its_side_meets_an_upright_mask(tmp_path: Path) -> None:
    folder(tmp_path, {"a": labels(0, 1)})
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(0, (SIZE[1], SIZE[0])).save(tmp_path / "images" / "train" / "a.jpg", exif=exif)
    image, mask = open_masks(tmp_path, "train").read(0)
    assert image.size == SIZE == mask.shape[::-1]


def test_a_value_outside_the_classes_names_file_and_value(tmp_path: Path) -> None:
    data = open_masks(folder(tmp_path, {"a": labels(0, 3)}), "train")
    with pytest.raises(UnreadableMask, match=r"a\.png has the value 3; expected 0 to 2, or 255"):
        data.read(0)
    Image.fromarray(labels(0, 1).astype(np.uint16) * 700).save(tmp_path / "masks" / "train" / "a.png")
    with pytest.raises(DataError, match="has the value 700"):
        data.read(0)


def test_masks_that_do_not_fit_are_errors_that_training_may_skip(tmp_path: Path) -> None:
    root = folder(tmp_path, {"size": labels(0, size=(12, 9)), "color": labels(0), "broken": labels(0)})
    picture(0, SIZE).save(root / "masks" / "train" / "color.png")
    (root / "masks" / "train" / "broken.png").write_bytes(b"no image")
    data = open_masks(root, "train")
    said = {"broken": "not a readable image", "color": "color image", "size": "12 x 9 px, its image .* 12 x 10"}
    for index, (name, message) in enumerate(sorted(said.items())):
        with pytest.raises(UnreadableImage, match=f"{name}.png.*{message}") as caught:
            data.read(index)
        assert isinstance(caught.value, DataError)


def test_images_without_a_mask_are_found_on_opening(tmp_path: Path) -> None:
    root = folder(tmp_path, {"a": labels(0), "b": labels(0)})
    (root / "masks" / "train" / "b.png").unlink()
    with pytest.raises(DataError, match=r"1 of 2 images .* have no mask: .*b\.jpg"):
        open_masks(root, "train")


def test_two_images_with_one_mask_are_an_error(tmp_path: Path) -> None:
    root = folder(tmp_path, {"a": labels(0)})
    picture(3, SIZE).save(root / "images" / "train" / "a.png")
    with pytest.raises(DataError, match="share one mask"):
        open_masks(root, "train")


@pytest.mark.parametrize("classes", ["", "one\n", "sky\nsky\n", "sky\n\nsea\n"])
def test_class_names_must_be_several_and_different(tmp_path: Path, classes: str) -> None:
    with pytest.raises(DataError, match=r"classes\.txt must name 2 to 255 different classes"):
        open_masks(folder(tmp_path, {"a": labels(0)}, classes), "train")


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    assert not is_masks(tmp_path)
    root = folder(tmp_path, {"a": labels(0)})
    with pytest.raises(DataError, match="no images and masks for val"):
        open_masks(root, "val")
    (root / "classes.txt").unlink()
    with pytest.raises(DataError, match="write a name per line"):
        open_masks(root, "train")


# -- published datasets --------------------------------------------------------------------------


def test_ade20k_ignores_label_0_and_counts_classes_from_0(tmp_path: Path) -> None:
    data = open_mask_data(ade20k(tmp_path, labels(0, 1, 150)), "val")
    assert mask_splits(tmp_path) == ["train", "val"]
    assert np.array_equal(data.read(0).mask, labels(255, 0, 149))
    assert data.class_names[0] == "class 1"
    assert len(data.class_names) == 150


@pytest.mark.parametrize("value", [151, 255])
def test_ade20k_has_no_other_labels(tmp_path: Path, value: int) -> None:
    with pytest.raises(DataError, match=rf"ADE_0001\.png has the value {value}; expected 0 to 150\."):
        open_ade20k(ade20k(tmp_path, labels(1, value)), "train").read(0)


def test_ade20k_takes_names_from_its_own_table(tmp_path: Path) -> None:
    ade20k(tmp_path, labels(1))
    rows = [f"{label}\t0.1\t10\t1\tthing {label}, other" for label in range(1, 151)]
    (tmp_path / "objectInfo150.txt").write_text("\n".join(["Idx\tRatio\tTrain\tVal\tName", *rows]))
    assert open_ade20k(tmp_path, "train").class_names[2] == "thing 3, other"
    (tmp_path / "objectInfo150.txt").write_text("\n".join(rows[:9]))
    with pytest.raises(DataError, match="names 9 classes"):
        open_ade20k(tmp_path, "train")
    with pytest.raises(DataError, match="train and val"):
        open_ade20k(tmp_path, "test")


def test_cityscapes_has_19_classes(tmp_path: Path) -> None:
    write(tmp_path / "leftImg8bit" / "val" / "ulm" / "ulm_01_leftImg8bit.png", picture(1, SIZE))
    mask = Image.fromarray(labels(0, 7, 33, 26))
    write(tmp_path / "gtFine" / "val" / "ulm" / "ulm_01_gtFine_labelIds.png", mask)
    write(tmp_path / "gtFine" / "val" / "ulm" / "ulm_01_gtFine_color.png", picture(2, SIZE))
    assert mask_splits(tmp_path) == ["val"]
    data = open_mask_data(tmp_path, "val")
    assert np.array_equal(data.read(0).mask, labels(255, 0, 18, 13))
    assert data.class_names == tuple(CITYSCAPES.values())
    assert len(data.class_names) == 19
    assert data.class_names[13] == "car"
    Image.fromarray(labels(34)).save(tmp_path / "gtFine" / "val" / "ulm" / "ulm_01_gtFine_labelIds.png")
    with pytest.raises(DataError, match="value 34; expected 0 to 33"):
        open_cityscapes(tmp_path, "val").read(0)


# -- problems ------------------------------------------------------------------------------------


def test_problems_of_a_split_are_told(tmp_path: Path) -> None:
    good = open_masks(folder(tmp_path / "good", {"a": labels(0, 1, 2)}), "train")
    assert list(mask_problems(good)) == []
    masks = {"a": labels(0, 1), "b": labels(9), "c": labels(255), "d": labels(0, size=(3, 3))}
    said = list(mask_problems(open_masks(folder(tmp_path / "bad", masks), "train")))
    assert len(said) == 3
    assert said[0].startswith("2 images cannot be used")
    assert "has the value 9" in said[0]
    assert "3 x 3 px" in said[0]
    assert "1 masks are 255 everywhere" in said[1]
    assert "1 classes have no pixel in any mask: land" in said[2]
