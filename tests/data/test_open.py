from pathlib import Path

import pytest

from mixlab.core.errors import DataError
from mixlab.data import open_data, require_same_classes, splits
from tests.data.make import folder


def test_digits_need_no_path() -> None:
    assert splits("digits") == ["train", "val", "test"]
    assert len(open_data("digits", "train")) == 1078


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("digit", "Did you mean 'digits'"),
        ("cifar11:/tmp", "Did you mean 'cifar10'"),
        ("vtab/svnh:/tmp", "'vtab/svhn'"),
        ("vtab:/tmp", "stands for 19 datasets, which only `mixlab transfer` takes at once"),
        ("cifar10", "'cifar10:PATH'"),
        ("cifar10:", "needs the folder"),
        ("cifar10:/no/such/folder", "'/no/such/folder' is not a folder"),
        ("/no/such/folder", "does not exist"),
        ("data/missing.csv", "does not exist"),
    ],
)
def test_what_is_not_there_is_an_error_that_helps(spec: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        open_data(spec, "train")


def test_an_unknown_split_lists_the_known() -> None:
    with pytest.raises(DataError, match="'valid'.*train, val, test"):  # noqa: RUF043
        open_data("digits", "valid")  # type: ignore[arg-type]


def test_a_file_of_another_kind_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "notes.pdf").write_bytes(b"%PDF")
    with pytest.raises(DataError, match="no dataset that is known"):
        open_data(tmp_path / "notes.pdf", "train")


def test_splits_with_the_same_classes_pass() -> None:
    require_same_classes(open_data("digits", "train"), open_data("digits", "val"))


def test_splits_with_other_classes_are_an_error_that_names_them(tmp_path: Path) -> None:
    root = folder(tmp_path, {"train": {"ant": 1, "bee": 1}, "val": {"bee": 1, "cow": 1}})
    with pytest.raises(DataError, match=r"first: 'ant'.*second: 'cow'"):
        require_same_classes(open_data(root, "train"), open_data(root, "val"))


def test_a_class_without_images_in_val_is_no_difference_if_its_folder_is_there(tmp_path: Path) -> None:
    root = folder(tmp_path, {"train": {"ant": 1, "bee": 1}, "val": {"ant": 0, "bee": 1}})
    val = open_data(root, "val")
    require_same_classes(open_data(root, "train"), val)
    assert val.label(0) == 1  # type: ignore[union-attr]
