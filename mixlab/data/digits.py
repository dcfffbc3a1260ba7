"""scikit-learn's handwritten digits: 1797 real images of 8 x 8 pixels that come with the package."""

import functools
import importlib.util
from pathlib import Path

import numpy as np

from mixlab.data.kinds import Array, ArrayData, needed

SHARES = {"train": 0.6, "val": 0.2, "test": 0.2}
LEVELS = 16  # the brightest pixel
SPLIT_SEED = 0


def open_digits(split: str) -> ArrayData:
    pixels, labels = load()
    numbers = np.flatnonzero(assignment() == list(SHARES).index(split))
    return ArrayData(
        pixels[numbers], labels[numbers], [str(digit) for digit in range(10)], origin="digits", numbers=numbers
    )


@functools.cache
def load() -> tuple[Array, Array]:
    """Images (1797, 8, 8) and labels (1797,)."""
    images, labels = read_file() or ask_package()
    return np.rint(images * (255 / LEVELS)).astype(np.uint8), labels


def read_file() -> tuple[Array, Array] | None:
    """From the package's file, without the seconds that it takes to import the package; None if there is none."""
    spec = importlib.util.find_spec("sklearn")
    places = [] if spec is None else spec.submodule_search_locations or []
    files = [Path(place, "datasets", "data", "digits.csv.gz") for place in places]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return None
    table = np.loadtxt(file, delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)


def ask_package() -> tuple[Array, Array]:
    digits = needed("sklearn.datasets").load_digits()
    return digits.images, digits.target


@functools.cache
def assignment() -> Array:
    """The number of each image's split: the same shares of every class, always the same images."""
    _, labels = load()
    splits = np.empty(len(labels), dtype=np.int64)
    random = np.random.RandomState(SPLIT_SEED)  # a stream that numpy keeps as it is
    for digit in range(10):
        members = random.permutation(np.flatnonzero(labels == digit))
        ends = np.rint(np.cumsum(list(SHARES.values())) * len(members)).astype(int)
        for number, part in enumerate(np.split(members, ends[:-1])):
            splits[part] = number
    return splits
