"""Batches of a dataset: the order and every augmentation follow from (seed, epoch), whoever loads them.

Nothing here depends on the number of workers, and the generators of the caller are left as they were.
"""

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from mixlab.core.errors import DataError, UnreadableImage
from mixlab.data.base import ImageData
from mixlab.data.dense import MaskData, ObjectData
from mixlab.data.images import decode
from mixlab.data.kinds import LISTED, Array
from mixlab.data.seeding import seed_generators, seed_of, seeded
from mixlab.data.shards import Reader, Sample, ShardStream

Transform = Callable[[Any], Any]  # of what a dataset reads: an image, or an image with what belongs to it
IndexedData = ImageData | MaskData | ObjectData

UNREADABLE_FLOOR = 10  # images that may be unreadable in a dataset of any size
AHEAD = 2  # batches that a worker prepares ahead
STAND_INS = 100  # images that are tried in place of a batch without a readable one
# Workers compute with one thread and touch no accelerator, which makes forking safe; it shares the data's memory.
START = "fork" if sys.platform == "linux" else "spawn"  # macOS has fork, and its libraries do not survive it


class Batch(NamedTuple):
    """Images of one size are one tensor. Labels: a class per image, a mask per image, or what to find in each."""

    images: Any  # a tensor (B, C, H, W), or a list of (C, H, W)
    labels: Any  # a tensor (B,) or (B, H, W), or a list of boxes, labels, ... by name
    indices: Tensor  # (B,) in the dataset; for a stream, each sample's own number


@dataclass(frozen=True)
class Slot:
    """One place in a batch: which image, and which of its augmentations."""

    index: int
    repeat: int


class LoadedSamples(NamedTuple):
    """What a worker hands back. No batch if none of its images could be read."""

    batch: Batch | None
    unreadable: list[str]


class Loader:
    """Batches of `batch_size` images on each of `world` processes, an epoch at a time.

    Training: a permutation by (seed, epoch) in global batches, of which each rank takes its share; what does not fill
    the last one is left out. Evaluation: every image once over all ranks, in the order of the data. Unreadable images
    make a batch smaller; a training batch with no other image takes the next readable one of the data.

    A `ShardStream` is shuffled through its buffer; there, going on from `start` is exact only with the same number of
    workers and ranks, and the length of an evaluation is an estimate.
    """

    def __init__(
        self,
        data: IndexedData | ShardStream,
        transform: Transform,
        *,
        batch_size: int,
        train: bool,
        seed: int,
        repeats: int = 1,
        workers: int = 0,
        rank: int = 0,
        world: int = 1,
        unreadable_limit: float = 0.01,
    ) -> None:
        self.data, self.transform = data, transform
        self.batch_size, self.train, self.seed, self.repeats = batch_size, train, seed, repeats
        self.workers, self.rank, self.world = workers, rank, world
        self.unreadable_limit = unreadable_limit
        self.unreadable: list[str] = []
        self.check()

    def check(self) -> None:
        if self.batch_size < 1 or self.repeats < 1 or self.workers < 0 or not 0 <= self.rank < self.world:
            raise DataError(
                f"Expected a batch size and repeats of 1 or more, no negative number of workers and a rank under the "
                f"{self.world} processes; got {self.batch_size}, {self.repeats}, {self.workers} and {self.rank}."
            )
        if self.train and not len(self):
            raise DataError(
                f"The batch is larger than the data: {self.batch_size} images on each of {self.world} processes, but "
                f"the train split has {len(self.data)}. Lower the batch size to {len(self.data) // self.world} or less."
            )

    def __len__(self) -> int:
        """Batches of one epoch on this rank."""
        if isinstance(self.data, ShardStream):
            batches = len(self.data) / (self.batch_size * self.world)
            return int(batches) if self.train else ceil(batches)
        return len(self.spans())

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches from number `start` on, exactly as if the ones before had been consumed."""
        loaded = (
            self.stream(epoch, start) if isinstance(self.data, ShardStream) else self.indexed(self.data, epoch, start)
        )
        with explain_dead_workers():
            for batch, unreadable in loaded:
                self.note(unreadable)
                if batch is not None:
                    yield batch

    def indexed(self, data: IndexedData, epoch: int, start: int) -> Iterable[LoadedSamples]:
        order = np.arange(len(data))
        if self.train:
            order = np.random.default_rng(seed_of(self.seed, epoch)).permutation(order)
        plan = SamplingPlan(order, self.repeats if self.train else 1, self.spans()[start:])
        samples = Samples(data, self.transform, seed=self.seed, epoch=epoch, train=self.train)
        workers = min(self.workers, len(plan))  # no more than there are batches
        return DataLoader(samples, batch_sampler=plan, **options(workers))

    def spans(self) -> list[tuple[int, int]]:
        """First and end position of each of this rank's batches in the global order."""
        total, size = len(self.data), self.batch_size
        if self.train:
            whole = size * self.world
            firsts = [number * whole + self.rank * size for number in range(total // whole)]
            return [(first, first + size) for first in firsts]
        first, end = (total * rank // self.world for rank in (self.rank, self.rank + 1))
        return [(place, min(place + size, end)) for place in range(first, end, size)]

    def stream(self, epoch: int, start: int) -> Iterable[LoadedSamples]:
        assert isinstance(self.data, ShardStream)
        batches = StreamBatches(self.data, self, epoch=epoch, start=start)
        loaded = DataLoader(batches, batch_size=None, **options(self.workers))
        return itertools.islice(loaded, max(0, len(self) - start)) if self.train else loaded

    def note(self, names: Sequence[str]) -> None:
        self.unreadable += [name for name in dict.fromkeys(names) if name not in self.unreadable]
        allowed = max(UNREADABLE_FLOOR, int(self.unreadable_limit * len(self.data)))
        if len(self.unreadable) > allowed:
            raise DataError(
                f"{len(self.unreadable)} of {len(self.data)} images are unreadable; {allowed} are tolerated. "
                f"The first: {', '.join(self.unreadable[:LISTED])}. Remove or replace them; `mixlab data check` "
                f"lists them all."
            )


@dataclass(frozen=True)
class SamplingPlan:
    """The batches of one rank as slots. The repeats of an image are neighbors in the global order."""

    order: Array  # (N,) indices
    repeats: int
    spans: list[tuple[int, int]]

    def __len__(self) -> int:
        return len(self.spans)

    def __iter__(self) -> Iterator[list[Slot]]:
        for first, end in self.spans:
            positions = np.arange(first, end)
            indices = self.order[positions // self.repeats].tolist()
            yield [Slot(*slot) for slot in zip(indices, (positions % self.repeats).tolist(), strict=True)]


class Samples(Dataset[LoadedSamples]):
    """A dataset whose items are whole batches, transformed."""

    def __init__(self, data: IndexedData, transform: Transform, *, seed: int, epoch: int, train: bool) -> None:
        self.data, self.transform = data, transform
        self.seed, self.epoch, self.train = seed, epoch, train

    def __getitems__(self, slots: Sequence[Slot]) -> LoadedSamples:
        unreadable: list[str] = []
        with seeded():
            loaded = [(slot, self.load(slot, unreadable)) for slot in slots]
            good = [(slot, image) for slot, image in loaded if image is not None]
            if not good and self.train:
                good = [self.stand_in(slots[0])]
        return LoadedSamples(self.batch(good), unreadable)

    def load(self, slot: Slot, unreadable: list[str]) -> Any:
        try:
            image = self.data.read(slot.index)
        except UnreadableImage:
            unreadable.append(self.data.name(slot.index))
            return None
        seed_generators(seed_of(self.seed, self.epoch, slot.index, slot.repeat))
        return self.transform(image)

    def stand_in(self, slot: Slot) -> tuple[Slot, Any]:
        """The next readable image of the data, so that a training batch is never empty."""
        for step in range(1, STAND_INS + 1):
            other = Slot((slot.index + step) % len(self.data), slot.repeat)
            image = self.load(other, [])
            if image is not None:
                return other, image
        raise DataError(
            f"Neither {self.data.name(slot.index)} nor the {STAND_INS} images after it can be read. "
            f"Run `mixlab data check` on this dataset."
        )

    def batch(self, good: Sequence[tuple[Slot, Any]]) -> Batch | None:
        if not good:
            return None
        indices = torch.tensor([slot.index for slot, _ in good])
        if isinstance(self.data, ImageData):
            labels = torch.tensor([self.data.label(slot.index) for slot, _ in good])
            return Batch(stacked([image for _, image in good]), labels, indices)
        images, targets = [image for _, (image, _) in good], [target for _, (_, target) in good]
        if isinstance(self.data, MaskData):
            return Batch(stacked(images), stacked(targets), indices)
        return Batch(images, targets, indices)


class StreamBatches(IterableDataset[LoadedSamples]):
    """Batches of a stream as one of its readers sees them; for training they do not end."""

    def __init__(self, stream: ShardStream, loader: Loader, *, epoch: int, start: int) -> None:
        self.source, self.transform, self.train = stream, loader.transform, loader.train
        self.seed, self.epoch, self.start = loader.seed, epoch, start
        self.batch_size, self.repeats = loader.batch_size, loader.repeats if loader.train else 1
        self.rank, self.world = loader.rank, loader.world

    def __iter__(self) -> Iterator[LoadedSamples]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        turn = (worker + self.start) % workers  # batch number n comes from worker n % workers
        reader = Reader(self.rank * workers + turn, self.world * workers)
        places = ((sample, repeat) for sample in self.samples(reader) for repeat in range(self.repeats))
        done = (self.start - turn + workers - 1) // workers
        for _ in range(done * self.batch_size):
            next(places, None)
        unreadable: list[str] = []
        while chunk := list(itertools.islice(places, self.batch_size)):
            batch = self.load(chunk, unreadable)
            if batch is None and self.train and len(unreadable) < STAND_INS:
                continue  # a training batch is never empty
            yield LoadedSamples(batch, unreadable)
            unreadable = []

    def samples(self, reader: Reader) -> Iterator[Sample]:
        for lap in itertools.count() if self.train else range(1):
            seed = seed_of(self.seed, lap) if lap else self.seed
            sample = None
            for sample in self.source.samples(train=self.train, seed=seed, epoch=self.epoch, reader=reader):
                yield sample
            if sample is None and self.train:
                raise DataError(
                    f"The shards have too few samples for {reader.slots} readers. Use fewer workers or processes."
                )

    def load(self, chunk: Sequence[tuple[Sample, int]], unreadable: list[str]) -> Batch | None:
        images, good = [], []
        for sample, repeat in chunk:
            try:
                image = decode(sample.raw, name=sample.name)
            except UnreadableImage:
                unreadable.append(sample.name)
                continue
            with seeded(seed_of(self.seed, self.epoch, sample.identity, repeat)):
                images.append(self.transform(image))
            good.append(sample)
        if not good:
            return None
        labels, identities = ([getattr(sample, what) for sample in good] for what in ("label", "identity"))
        return Batch(stacked(images), torch.tensor(labels), torch.tensor(identities))


def stacked(images: Sequence[Tensor]) -> Tensor:
    """One tensor; a worker makes it in the memory that it shares with the trainer, which spares a copy."""
    if get_worker_info() is None:
        return torch.stack(list(images))
    shared = torch.empty(len(images), *images[0].shape, dtype=images[0].dtype).share_memory_()
    return torch.stack(list(images), out=shared)


def options(workers: int) -> dict[str, Any]:
    started: dict[str, Any] = {"prefetch_factor": AHEAD, "multiprocessing_context": START} if workers else {}
    generator = torch.Generator()  # else torch draws a seed for the workers from the global one
    return {"num_workers": workers, "collate_fn": as_it_is, "generator": generator, **started}


def as_it_is(loaded: LoadedSamples) -> LoadedSamples:
    return loaded


@contextmanager
def explain_dead_workers() -> Iterator[None]:
    """A clear error if a worker dies. torch may notice it while the caller computes, so a training loop uses it too."""
    try:
        yield
    except DataError as error:
        said = str(error).strip().splitlines()
        if not said[0].startswith("Caught DataError"):
            raise
        raise DataError(said[-1].partition(": ")[2]) from error  # torch puts the worker's traceback in front
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise DataError(
            f"A process that loads data died ({str(error).splitlines()[0].strip().rstrip('.')}). Most often memory or "
            f"shared memory (/dev/shm) ran out: use fewer workers or a smaller batch. With 0 workers a fault in the "
            f"data or in the transform shows where it is."
        ) from error
