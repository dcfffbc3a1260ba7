import importlib.util
from collections import Counter

import numpy as np
import pytest

from mixlab.data.digits import ask_package, open_digits, read_file

FIRST = (21, 24, 28)  # of the test split


def test_the_splits_are_60_20_20_percent_of_every_class() -> None:
    sizes = {split: len(open_digits(split)) for split in ("train", "val", "test")}
    assert sum(sizes.values()) == 1797
    for split, share in {"train": 0.6, "val": 0.2, "test": 0.2}.items():
        data = open_digits(split)
        counts = Counter(data.label(index) for index in range(len(data)))
        assert all(abs(count - share * 179.7) < 4 for count in counts.values())
        assert len(counts) == 10


def test_every_image_is_in_one_split() -> None:
    names = [data.name(index) for data in map(open_digits, ("train", "val", "test")) for index in range(len(data))]
    assert len(set(names)) == 1797


def test_the_split_never_changes() -> None:
    assert [open_digits("test").name(index) for index in range(3)] == [f"digits[{number}]" for number in FIRST]


def test_images_are_grey_in_8_bits() -> None:
    image = open_digits("train").read(0)
    assert (image.mode, image.size) == ("L", (8, 8))
    assert image.getextrema() == (0, 255)


def test_the_file_holds_what_the_package_gives() -> None:
    read, asked = read_file(), ask_package()
    assert read is not None
    for one, other in zip(read, asked, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype


def test_the_package_is_asked_where_the_file_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert read_file() is None
