"""scikit-learn's handwritten digits: 1797 real images of 8 x 8 pixels that come with the package."""

import functools

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
    digits = needed("sklearn.datasets").load_digits()
    return np.rint(digits.images * (255 / LEVELS)).astype(np.uint8), digits.target  # (1797, 8, 8), (1797,)


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
