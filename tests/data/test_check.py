import json
from pathlib import Path

import pytest
from PIL import Image

from mixlab.core.errors import DataError
from mixlab.data import check_data
from tests.data.make import folder, picture, shards, write


def problems(root: Path) -> str:
    return "\n".join(check_data(root).problems)


def test_a_good_dataset_has_no_problems_and_right_counts(tmp_path: Path) -> None:
    root = folder(tmp_path, {"train": {"a": 3, "b": 2}, "val": {"a": 1, "b": 1}})
    report = check_data(root)
    assert report.problems == []
    assert report.splits == {"train": 5, "val": 2}
    assert report.classes == {"a": {"train": 3, "val": 1}, "b": {"train": 2, "val": 1}}


def test_digits_are_in_order_but_for_real_duplicates() -> None:
    report = check_data("digits")
    assert sum(report.splits.values()) == 1797
    assert report.problems == []


def test_sizes_and_stored_modes_are_reported(tmp_path: Path) -> None:
    root = folder(tmp_path, {"train": {"a": 2, "b": 2}, "val": {"a": 1, "b": 1}})
    write(root / "train" / "a" / "large.jpg", Image.new("CMYK", (99, 33)))
    report = check_data(root)
    assert report.sizes == {"min": (12, 10), "median": (12, 10), "max": (99, 33)}
    assert report.modes == {"RGB": 6, "CMYK": 1}


def test_unreadable_files_are_named_with_what_to_do(tmp_path: Path) -> None:
    root = folder(tmp_path, {"train": {"a": 2, "b": 2}, "val": {"a": 1, "b": 1}})
    (root / "train" / "a" / "bad.jpg").write_bytes(b"no image")
    report = check_data(root)
    assert list(report.unreadable) == [str(root / "train" / "a" / "bad.jpg")]
    assert "1 images cannot be read" in report.problems[0]
    assert "Remove or replace" in report.problems[0]


def test_the_same_pixels_in_two_splits_are_found_in_another_format_too(tmp_path: Path) -> None:
    root = folder(tmp_path, {"train": {"a": 2, "b": 2}, "val": {"a": 1, "b": 1}})
    copy = write(root / "val" / "a" / "copy.bmp", picture(0))
    report = check_data(root)
    assert report.duplicates == [[str(root / "train" / "a" / "0.png"), str(copy)]]
    assert "more than one split" in report.problems[0]


def test_a_class_without_images_in_a_split_is_a_problem(tmp_path: Path) -> None:
    root = folder(tmp_path, {"train": {"a": 2, "b": 2}, "val": {"a": 1, "b": 0}})
    assert "1 classes have no images in val: b" in problems(root)


def test_a_class_of_one_image_is_a_problem(tmp_path: Path) -> None:
    root = folder(tmp_path, {"train": {"a": 2, "b": 1}, "val": {"a": 1, "b": 1}})
    assert "fewer than 2 training images: b" in problems(root)


def test_a_heavy_imbalance_is_a_problem(tmp_path: Path) -> None:
    root = folder(tmp_path, {"train": {"a": 43, "b": 2}, "val": {"a": 1, "b": 1}})
    assert "'a' has 43 images, 'b' has 2" in problems(root)


def test_class_names_that_differ_by_case_are_a_problem(tmp_path: Path) -> None:
    root = folder(tmp_path, {"train": {"Cat": 2, "cat": 2}, "val": {"Cat": 1, "cat": 1}})
    assert "'Cat' and 'cat' differ only in case" in problems(root)


def test_one_class_and_a_missing_val_split_are_problems(tmp_path: Path) -> None:
    root = folder(tmp_path, {"train": {"a": 2}})
    assert "one class only" in problems(root)
    assert "no val split" in problems(folder(tmp_path / "two", {"train": {"a": 2, "b": 2}}))


def test_shards_are_checked_too(tmp_path: Path) -> None:
    shards(tmp_path, 2, 6)
    shards(tmp_path, 1, 6, "val")  # the same pictures as in train
    report = check_data(tmp_path)
    assert report.splits == {"train": 12, "val": 6}
    assert len(report.duplicates) == 6


def test_the_report_is_json_and_text(tmp_path: Path) -> None:
    root = folder(tmp_path, {"train": {"ant": 2, "bee": 2}})
    report = check_data(root)
    assert json.loads(json.dumps(report.plain())) == report.plain()
    assert "2 classes; images: train 4" in report.text()
    assert "- There is no val split" in report.text()


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    root = folder(tmp_path, {"train": {"a": 3, "b": 3}, "val": {"a": 1, "b": 1}})
    check_data(root, progress=lambda done, total: told.append((done, total)))
    assert told == [(6, 8), (8, 8)]


def test_what_cannot_be_opened_raises() -> None:
    with pytest.raises(DataError, match="does not exist"):
        check_data("/no/such/data")
