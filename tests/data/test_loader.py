import multiprocessing
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from mixlab.core.errors import DataError, UnreadableImage
from mixlab.data import Batch, ImageData, Loader, ShardStream, eval_transform, open_data, train_transform
from mixlab.data import loader as loader_module
from mixlab.data.kinds import ArrayData
from mixlab.data.loader import explain_dead_workers
from mixlab.models.config import Preprocessing
from mixlab.training.recipe import Augmentation
from tests.data.make import Array, packed, picture, shard, shards

GRAY = Preprocessing(mean=(0.5,), std=(0.25,))
AUGMENTED = train_transform(
    Augmentation(randaugment="rand-m9-mstd0.5-inc1", erasing=0.5, jitter=(0.4, 0.4, 0.4, 0.0)), (16, 16), GRAY, 1
)
PLAIN = eval_transform((8, 8), GRAY, 1)


def images(count: int) -> ArrayData:
    pixels: Array = torch.arange(count, dtype=torch.uint8)[:, None, None].expand(count, 8, 8).contiguous().numpy()
    return ArrayData(pixels, [number % 3 for number in range(count)], ["a", "b", "c"], origin="numbers")


class Broken(ImageData):
    """Every image whose index is in `bad` is unreadable."""

    def __init__(self, count: int, bad: set[int]) -> None:
        self.good, self.bad = images(count), bad
        self.class_names = self.good.class_names

    def __len__(self) -> int:
        return len(self.good)

    def label(self, index: int) -> int:
        return self.good.label(index)

    def read(self, index: int) -> Image.Image:
        if index in self.bad:
            raise UnreadableImage(self.name(index))
        return self.good.read(index)

    def name(self, index: int) -> str:
        return self.good.name(index)


def make(data: ImageData | ShardStream, **options: Any) -> Loader:
    chosen: dict[str, Any] = {"train": True, "batch_size": 4, "seed": 0, "transform": PLAIN, **options}
    return Loader(data, **chosen)


def indices(batches: Any) -> list[list[int]]:
    return [batch.indices.tolist() for batch in batches]


def assert_same(first: list[Batch], second: list[Batch]) -> None:
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


# -- order ---------------------------------------------------------------------------------------


def test_a_batch_has_images_labels_and_indices() -> None:
    batch = next(make(images(8)).epoch(0))
    assert (batch.images.shape, batch.images.dtype) == ((4, 1, 8, 8), torch.float32)
    assert torch.equal(batch.labels, batch.indices % 3)
    assert torch.allclose(batch.images[:, 0, 0, 0] * 0.25 + 0.5, batch.indices / 255)


def test_an_epoch_is_a_permutation_without_the_incomplete_batch() -> None:
    loader = make(images(11))
    seen = [index for batch in indices(loader.epoch(0)) for index in batch]
    assert len(loader) == 2
    assert len(seen) == len(set(seen)) == 8


def test_the_order_follows_from_seed_and_epoch() -> None:
    orders = [indices(make(images(40), seed=seed).epoch(epoch)) for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2] != orders[3] != orders[0]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_take_their_share_of_each_global_batch(world: int) -> None:
    alone = indices(make(images(50), batch_size=4 * world).epoch(2))
    shares = [indices(make(images(50), rank=rank, world=world).epoch(2)) for rank in range(world)]
    joined = [[index for part in parts for index in part] for parts in zip(*shares, strict=True)]
    assert joined == alone


@pytest.mark.parametrize(("count", "world"), [(10, 1), (10, 3), (2, 4), (16, 4)])
def test_evaluation_sees_every_sample_once_in_order(count: int, world: int) -> None:
    loaders = [make(images(count), train=False, rank=rank, world=world) for rank in range(world)]
    parts = [indices(loader.epoch(0)) for loader in loaders]
    assert [index for part in parts for batch in part for index in batch] == list(range(count))
    assert [len(part) for part in parts] == [len(loader) for loader in loaders]


def test_a_batch_larger_than_the_data_is_an_error() -> None:
    with pytest.raises(DataError, match=r"batch is larger than the data.*to 3 or less"):
        make(images(7), world=2)


def test_evaluation_may_have_a_batch_larger_than_the_data() -> None:
    assert indices(make(images(3), train=False, batch_size=100).epoch(0)) == [[0, 1, 2]]


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"repeats": 0}, {"workers": -1}, {"rank": 2, "world": 2}])
def test_impossible_numbers_are_an_error(wrong: dict[str, int]) -> None:
    with pytest.raises(DataError, match="Expected"):
        make(images(8), **wrong)


# -- repeated augmentation -----------------------------------------------------------------------


def test_repeats_of_a_sample_are_neighbors_and_the_epoch_is_as_long() -> None:
    loader = make(images(24), repeats=3)
    seen = [index for batch in indices(loader.epoch(0)) for index in batch]
    assert len(seen) == 24
    assert set(Counter(seen).values()) == {3}
    assert all(seen[place] == seen[place + 1] == seen[place + 2] for place in range(0, 24, 3))


def test_repeats_are_augmented_each_on_its_own() -> None:
    digits = open_data("digits", "val")
    batch = next(make(digits, repeats=2, transform=AUGMENTED).epoch(0))
    assert batch.indices[0] == batch.indices[1]
    assert not torch.equal(batch.images[0], batch.images[1])


# -- determinism ---------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_do_not_depend_on_the_number_of_workers(workers: int) -> None:
    digits = open_data("digits", "val")
    parts = [
        list(make(digits, batch_size=50, transform=AUGMENTED, workers=count, repeats=2).epoch(1))
        for count in (0, workers)
    ]
    assert_same(*parts)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_goes_on_from_the_middle(workers: int) -> None:
    loader = make(open_data("digits", "val"), batch_size=40, transform=AUGMENTED, workers=workers)
    assert_same(list(loader.epoch(3))[5:], list(loader.epoch(3, start=5)))


def test_an_augmentation_differs_between_epochs() -> None:
    digits = open_data("digits", "val")
    loader = make(digits, batch_size=360, transform=AUGMENTED)
    first, second = (next(loader.epoch(epoch)) for epoch in (0, 1))
    place = second.indices.tolist().index(int(first.indices[0]))
    assert not torch.equal(first.images[0], second.images[place])


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_leaves_the_callers_generator_alone(workers: int) -> None:
    before = torch.get_rng_state()
    list(make(images(8), transform=AUGMENTED, workers=workers).epoch(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_what_workers_get_can_be_sent_to_a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = list(make(images(8), transform=AUGMENTED).epoch(0))
    monkeypatch.setattr(loader_module, "START", "spawn")
    assert_same(expected, list(make(images(8), transform=AUGMENTED, workers=1).epoch(0)))


# -- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_are_skipped_and_named(workers: int) -> None:
    loader = make(Broken(12, {2, 7}), train=False, workers=workers)
    assert indices(loader.epoch(0)) == [[0, 1, 3], [4, 5, 6], [8, 9, 10, 11]]
    assert loader.unreadable == ["numbers[2]", "numbers[7]"]


def test_an_unreadable_image_is_counted_once() -> None:
    loader = make(Broken(12, {2, 7}), train=False)
    list(loader.epoch(0))
    list(loader.epoch(1))
    assert len(loader.unreadable) == 2


def test_too_many_unreadable_images_are_an_error_that_names_them() -> None:
    loader = make(Broken(200, set(range(11))), train=False)
    with pytest.raises(DataError, match=r"of 200 images are unreadable; 10 are tolerated.*numbers\[0\]"):
        list(loader.epoch(0))


def test_the_limit_is_a_share_of_the_data() -> None:
    loader = make(Broken(200, set(range(11))), train=False, unreadable_limit=0.1)
    assert sum(len(batch.indices) for batch in loader.epoch(0)) == 189


def test_a_training_batch_without_a_readable_image_takes_the_next_one() -> None:
    loader = make(Broken(6, {3}), batch_size=1)
    seen = [index for batch in indices(loader.epoch(0)) for index in batch]
    assert len(seen) == len(loader) == 6
    assert sorted(seen) == [0, 1, 2, 4, 4, 5]


def test_an_evaluation_batch_without_a_readable_image_is_left_out() -> None:
    assert indices(make(Broken(4, {1}), train=False, batch_size=1).epoch(0)) == [[0], [2], [3]]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_data_reads_the_same_from_a_worker(workers: int, tmp_path: Path) -> None:
    missing = ShardStream([tmp_path / "gone.tar"], class_names=["a", "b"], length=8)
    with pytest.raises(DataError, match=r"^The shard .*gone\.tar cannot be opened"):
        next(make(missing, workers=workers).epoch(0))


@pytest.mark.parametrize("workers", [0, 1])
def test_nothing_is_left_behind_the_last_batch(workers: int) -> None:
    loader = make(images(8), workers=workers)
    assert list(loader.epoch(0, start=len(loader))) == []


class Slow:
    """A transform that gives time to interfere."""

    def __call__(self, image: Image.Image) -> Tensor:
        time.sleep(0.1)
        return torch.zeros(1, 8, 8)


def test_a_worker_that_dies_is_a_clear_error() -> None:
    loader = make(images(200), transform=Slow(), workers=1)

    def consume() -> None:
        with explain_dead_workers():
            for _ in loader.epoch(0):
                for child in multiprocessing.active_children():
                    child.kill()

    with pytest.raises(DataError, match=r"loads data died.*fewer workers"):
        consume()


def test_an_epoch_that_is_left_early_ends_quickly() -> None:
    epoch = make(images(200), transform=Slow(), workers=2).epoch(0)
    next(epoch)
    begin = time.monotonic()
    epoch.close()  # type: ignore[attr-defined]
    assert time.monotonic() - begin < 3
    assert not multiprocessing.active_children()


# -- shards --------------------------------------------------------------------------------------


def stream(root: Path, count: int = 3, each: int = 8) -> ShardStream:
    data = open_data(shards(root, count, each), "train")
    assert isinstance(data, ShardStream)
    return data


RGB = eval_transform((8, 8), Preprocessing(), 3)
RGB_AUGMENTED = train_transform(Augmentation(randaugment="rand-m9"), (8, 8), Preprocessing(), 3)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2])
def test_an_evaluation_of_shards_sees_every_sample_once(world: int, workers: int, tmp_path: Path) -> None:
    data = stream(tmp_path)
    loaders = [make(data, train=False, transform=RGB, rank=rank, world=world, workers=workers) for rank in range(world)]
    seen = [index for loader in loaders for batch in indices(loader.epoch(0)) for index in batch]
    assert len(seen) == len(set(seen)) == 24


@pytest.mark.parametrize("workers", [0, 2])
def test_every_rank_has_as_many_training_batches_of_shards(workers: int, tmp_path: Path) -> None:
    data = stream(tmp_path)
    for rank in range(2):
        loader = make(data, transform=RGB, rank=rank, world=2, workers=workers)
        assert [len(batch.indices) for batch in loader.epoch(0)] == [4, 4, 4]
        assert len(loader) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_shards_go_on_from_the_middle_with_as_many_workers(workers: int, tmp_path: Path) -> None:
    loader = make(stream(tmp_path), transform=RGB_AUGMENTED, batch_size=3, workers=workers)
    whole = list(loader.epoch(1))
    assert len(whole) == 8
    assert_same(whole[3:], list(loader.epoch(1, start=3)))


def test_a_training_batch_of_shards_is_never_empty(tmp_path: Path) -> None:
    files = [packed(picture(0)), b"broken", packed(picture(2)), packed(picture(3))]
    path = shard(
        tmp_path / "a.tar", [(f"{key}", {"png": raw, "cls": b"%d" % (key % 2)}) for key, raw in enumerate(files)]
    )
    loader = make(ShardStream([path]), batch_size=1, transform=RGB)
    assert [len(batch.indices) for batch in loader.epoch(0)] == [1, 1, 1, 1]
    assert loader.unreadable == [f"{path}/1"]


def test_unreadable_images_in_shards_are_skipped_and_named(tmp_path: Path) -> None:
    samples = [(f"{number}", {"png": packed(picture(number)), "cls": b"0"}) for number in range(3)]
    path = shard(tmp_path / "val.tar", [*samples, ("broken", {"png": b"broken", "cls": b"1"})])
    loader = make(ShardStream([path]), train=False, transform=RGB)
    assert [len(batch.indices) for batch in loader.epoch(0)] == [3]
    assert loader.unreadable == [f"{path}/broken"]
