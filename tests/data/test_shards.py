from pathlib import Path

import pytest

from mixlab.core.errors import DataError
from mixlab.data import ShardStream, open_data, splits
from mixlab.data.shards import Reader, Sample
from tests.data.make import packed, picture, shard, shards


def stream(root: Path, split: str = "train") -> ShardStream:
    data = open_data(root, split)  # type: ignore[arg-type]
    assert isinstance(data, ShardStream)
    return data


def read(data: ShardStream, *, train: bool = False, epoch: int = 0, reader: Reader = Reader()) -> list[Sample]:  # noqa: B008
    return list(data.samples(train=train, seed=0, epoch=epoch, reader=reader))


def test_shards_are_counted_and_classes_numbered(tmp_path: Path) -> None:
    data = stream(shards(tmp_path, 3, 5))
    assert len(data) == 15
    assert data.class_names == ("0", "1", "2")
    assert [sample.label for sample in read(data)] == [number % 3 for number in range(15)]


def test_class_names_come_from_the_file_beside_the_shards(tmp_path: Path) -> None:
    (shards(tmp_path, 1, 3) / "classes.txt").write_text("ant\nbee\ncow\n")
    assert stream(tmp_path).class_names == ("ant", "bee", "cow")


def test_a_length_and_names_that_are_given_spare_the_look_through(tmp_path: Path) -> None:
    missing = ShardStream([tmp_path / "gone.tar"], class_names=["a", "b"], length=1000)
    assert len(missing) == 1000


def test_splits_are_told_by_file_names(tmp_path: Path) -> None:
    shards(tmp_path, 2, 3)
    shards(tmp_path, 1, 3, "val")
    assert splits(tmp_path) == ["train", "val"]
    assert len(stream(tmp_path, "val")) == 3


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
@pytest.mark.parametrize("train", [True, False])
def test_readers_share_the_samples_without_overlap(train: bool, slots: int, tmp_path: Path) -> None:
    data = stream(shards(tmp_path, 3, 5))
    parts = [read(data, train=train, reader=Reader(slot, slots)) for slot in range(slots)]
    names = [sample.name for part in parts for sample in part]
    assert len(names) == len(set(names)) == 15


def test_the_training_order_follows_from_seed_and_epoch(tmp_path: Path) -> None:
    data = stream(shards(tmp_path, 3, 5))
    names = [[sample.name for sample in read(data, train=True, epoch=epoch)] for epoch in (0, 0, 1)]
    assert names[0] == names[1] != names[2]


def test_a_small_buffer_loses_nothing(tmp_path: Path) -> None:
    shards(tmp_path, 2, 6)
    data = ShardStream(sorted(tmp_path.glob("*.tar")), buffer=3)
    assert len({sample.name for sample in read(data, train=True)}) == 12


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    path = shards(tmp_path, 1, 6) / "train-0000.tar"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(DataError, match=r"train-0000\.tar"):
        read(ShardStream([path], class_names=["a", "b", "c"], length=6))


def test_an_image_without_a_class_is_named(tmp_path: Path) -> None:
    path = shard(tmp_path / "train.tar", [("a", {"png": packed(picture(0)), "cls": b"0"}), ("b", {"png": b"x"})])
    with pytest.raises(DataError, match=r"train\.tar/b has an image but no class"):
        read(ShardStream([path]))


def test_a_class_outside_the_names_is_an_error(tmp_path: Path) -> None:
    shards(tmp_path, 1, 3)
    (tmp_path / "classes.txt").write_text("ant\nbee\n")
    with pytest.raises(DataError, match=r"class '2'; expected a number under 2.*classes\.txt"):
        read(stream(tmp_path))


def test_a_file_that_is_no_archive_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "train.tar").write_bytes(b"nothing")
    with pytest.raises(DataError, match="cannot be opened"):
        stream(tmp_path)
