from collections import Counter

import pytest

from mixlab.core.errors import DataError
from mixlab.data import ImageData, Joined, Subset, hold_out, open_data
from mixlab.data.subset import spread


def digits(split: str) -> ImageData:
    data = open_data("digits", split)  # type: ignore[arg-type]
    assert isinstance(data, ImageData)
    return data


def names(data: ImageData) -> list[str]:
    return [data.name(index) for index in range(len(data))]


def test_a_subset_has_the_images_at_its_indices() -> None:
    data = digits("val")
    part = Subset(data, [5, 3])
    assert names(part) == [data.name(5), data.name(3)]
    assert part.label(1) == data.label(3)
    assert part.read(0).tobytes() == data.read(5).tobytes()


def test_a_spread_covers_the_whole_of_the_data() -> None:
    data = digits("val")
    assert names(spread(data, 3)) == [data.name(index * len(data) // 3) for index in range(3)]
    assert names(spread(data, 10**6)) == names(data)


def test_joined_data_come_one_behind_the_other() -> None:
    train, val = digits("train"), digits("val")
    both = Joined(train, val)
    assert names(both) == names(train) + names(val)
    assert both.label(len(train)) == val.label(0)
    assert both.read(len(both) - 1).tobytes() == val.read(len(val) - 1).tobytes()


def test_hold_out_takes_the_same_share_of_every_class() -> None:
    data = digits("train")
    kept, held = hold_out(data, 0.25)
    assert sorted(names(kept) + names(held)) == sorted(names(data))
    counts = Counter(held.label(index) for index in range(len(held)))
    assert all(25 <= counts[digit] <= 29 for digit in range(10))


def test_hold_out_is_the_same_for_the_same_seed() -> None:
    data = digits("val")
    assert names(hold_out(data, 0.1, seed=1)[1]) == names(hold_out(data, 0.1, seed=1)[1])
    assert names(hold_out(data, 0.1, seed=1)[1]) != names(hold_out(data, 0.1, seed=2)[1])


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0])
def test_a_share_outside_0_to_1_is_an_error(share: float) -> None:
    with pytest.raises(DataError, match="between 0 and 1"):
        hold_out(digits("val"), share)
