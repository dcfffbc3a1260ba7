"""Parts of a dataset, and datasets behind one another."""

import bisect
import itertools
from collections.abc import Sequence

import numpy as np
from PIL import Image

from mixlab.core.errors import DataError
from mixlab.data.base import ImageData


class Subset(ImageData):
    """Some images of a dataset, in the order given."""

    def __init__(self, data: ImageData, indices: Sequence[int]) -> None:
        self.data = data
        self.indices = [int(index) for index in indices]
        self.class_names = data.class_names

    def __len__(self) -> int:
        return len(self.indices)

    def label(self, index: int) -> int:
        return self.data.label(self.indices[index])

    def read(self, index: int) -> Image.Image:
        return self.data.read(self.indices[index])

    def name(self, index: int) -> str:
        return self.data.name(self.indices[index])


class Joined(ImageData):
    """Datasets of the same classes, one behind the other: train and val for the last run before the test."""

    def __init__(self, *parts: ImageData) -> None:
        if len({part.class_names for part in parts}) != 1:
            raise DataError(f"Only datasets of the same classes can be joined; got {len(parts)} that differ.")
        self.parts = parts
        self.ends = list(itertools.accumulate(len(part) for part in parts))
        self.class_names = parts[0].class_names

    def __len__(self) -> int:
        return self.ends[-1]

    def find(self, index: int) -> tuple[ImageData, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = bisect.bisect_right(self.ends, index)
        return self.parts[part], index - (self.ends[part] - len(self.parts[part]))

    def label(self, index: int) -> int:
        part, inside = self.find(index)
        return part.label(inside)

    def read(self, index: int) -> Image.Image:
        part, inside = self.find(index)
        return part.read(inside)

    def name(self, index: int) -> str:
        part, inside = self.find(index)
        return part.name(inside)


def spread(data: ImageData, count: int) -> Subset:
    """So many images at even distances, or all: neighbors in a folder show one class."""
    kept = min(count, len(data))
    return Subset(data, [index * len(data) // kept for index in range(kept)])


def hold_out(data: ImageData, share: float = 0.1, *, seed: int = 0) -> tuple[Subset, Subset]:
    """Training images and a held-out share of every class; the same ones for the same seed."""
    if not 0 < share < 1:
        raise DataError(f"The share to hold out is between 0 and 1; got {share}.")
    labels = np.array([data.label(index) for index in range(len(data))])
    random = np.random.RandomState(seed)  # a stream that numpy keeps as it is
    order = random.permutation(len(labels))
    held: list[int] = []
    for number in range(len(data.class_names)):
        members = order[labels[order] == number]
        held += members[: round(share * len(members))].tolist()
    kept = np.setdiff1d(np.arange(len(labels)), held)
    return Subset(data, kept.tolist()), Subset(data, sorted(held))
