from pathlib import Path

import pytest

from mixlab.core.errors import DataError
from mixlab.data import open_data, splits
from mixlab.data.base import ImageData
from tests.data.make import folder, picture, write


def opened(root: Path, split: str = "train") -> ImageData:
    data = open_data(root, split)  # type: ignore[arg-type]
    assert isinstance(data, ImageData)
    return data


def test_classes_are_sorted_and_images_have_their_class(tmp_path: Path) -> None:
    data = opened(folder(tmp_path, {"train": {"dog": 2, "cat": 3}}))
    assert data.class_names == ("cat", "dog")
    assert [data.label(index) for index in range(len(data))] == [0, 0, 0, 1, 1]
    assert all(Path(data.name(index)).parent.name == data.class_names[data.label(index)] for index in range(5))


def test_reading_gives_the_image(tmp_path: Path) -> None:
    data = opened(folder(tmp_path, {"train": {"cat": 1, "dog": 1}}))
    assert data.read(1).tobytes() == picture(1).tobytes()


def test_class_folders_without_splits_are_training_data(tmp_path: Path) -> None:
    root = folder(tmp_path, {"": {"cat": 1, "dog": 1}})
    assert splits(root) == ["train"]
    assert len(opened(root)) == 2


def test_a_missing_val_split_says_what_to_do(tmp_path: Path) -> None:
    root = folder(tmp_path, {"": {"cat": 1, "dog": 1}})
    with pytest.raises(DataError, match=r"no val split; it has train.*ROOT/val/CLASS"):
        opened(root, "val")


def test_validation_is_another_name_of_val(tmp_path: Path) -> None:
    root = folder(tmp_path, {"train": {"a": 1, "b": 1}, "validation": {"a": 1, "b": 2}})
    assert splits(root) == ["train", "val"]
    assert len(opened(root, "val")) == 3


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    root = folder(tmp_path, {"": {"bus": 1, "train": 2}})
    assert opened(root).class_names == ("bus", "train")


def test_hidden_files_and_other_files_are_ignored(tmp_path: Path) -> None:
    root = folder(tmp_path, {"train": {"a": 1, "b": 1}})
    write(root / "train" / "a" / ".hidden.png", picture(8))
    write(root / "train" / ".thumbnails" / "x.png", picture(9))
    (root / "train" / "a" / "notes.txt").write_text("nothing")
    assert len(opened(root)) == 2
    assert opened(root).class_names == ("a", "b")


def test_extensions_may_be_upper_case_and_images_lie_deeper(tmp_path: Path) -> None:
    root = folder(tmp_path, {"train": {"a": 1, "b": 1}})
    write(root / "train" / "b" / "2024" / "SHOT.JPG", picture(3))
    assert len(opened(root)) == 3


def test_an_empty_folder_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"No dataset.*ROOT/train"):
        opened(tmp_path)


def test_a_split_without_images_says_what_is_expected(tmp_path: Path) -> None:
    folder(tmp_path, {"train": {"a": 1, "b": 1}, "val": {"a": 0}})
    with pytest.raises(DataError, match=r"No images in .*val"):
        opened(tmp_path, "val")


def test_one_class_cannot_be_trained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="one class only, 'cat'"):
        opened(folder(tmp_path, {"train": {"cat": 3}}))
