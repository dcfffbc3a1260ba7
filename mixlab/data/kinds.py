"""The two shapes that nearly every dataset has: image files with labels, and one array of pixels with labels."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mixlab.core.errors import DataError
from mixlab.data.base import ImageData
from mixlab.data.images import decode

Array = np.ndarray[Any, Any]

LISTED = 5  # how many examples an error names


class FileData(ImageData):
    """One file per image."""

    def __init__(self, paths: Sequence[Path], labels: Sequence[int], class_names: Sequence[str]) -> None:
        self.class_names = tuple(class_names)
        self.paths = [str(path) for path in paths]  # a million Path objects are slow to send to a worker
        self.labels = check_labels(labels, len(paths), len(class_names), "the file list")

    def __len__(self) -> int:
        return len(self.paths)

    def label(self, index: int) -> int:
        return int(self.labels[index])

    def read(self, index: int) -> Image.Image:
        return decode(Path(self.paths[index]))

    def name(self, index: int) -> str:
        return self.paths[index]


class ArrayData(ImageData):
    """All images in memory, (N, H, W) gray or (N, H, W, 3), uint8."""

    def __init__(
        self,
        pixels: Array,
        labels: Sequence[int] | Array,
        class_names: Sequence[str],
        *,
        origin: str,
        numbers: Sequence[int] | Array | None = None,
    ) -> None:
        self.class_names = tuple(class_names)
        self.pixels = pixels
        self.labels = check_labels(labels, len(pixels), len(class_names), origin)
        self.origin = origin
        self.numbers = np.arange(len(pixels)) if numbers is None else np.asarray(numbers)  # within the origin

    def __len__(self) -> int:
        return len(self.pixels)

    def label(self, index: int) -> int:
        return int(self.labels[index])

    def read(self, index: int) -> Image.Image:
        return Image.fromarray(self.pixels[index])

    def name(self, index: int) -> str:
        return f"{self.origin}[{self.numbers[index]}]"


def check_labels(labels: Sequence[int] | Array, images: int, classes: int, origin: str) -> Array:
    found = np.asarray(labels, dtype=np.int64)
    if len(found) != images:
        raise DataError(f"{origin} has {images} images but {len(found)} labels. The files do not belong together.")
    if len(found) and not (found.min() >= 0 and found.max() < classes):
        raise DataError(
            f"{origin} has labels from {found.min()} to {found.max()}; expected 0 to {classes - 1} "
            f"for its {classes} classes. The files are broken or belong to another dataset."
        )
    return found


def needed(module: str) -> Any:
    """Import an optional package, or say how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"This dataset needs the package of {module!r}, which is not installed. Run: pip install 'mixlab[data]'"
        ) from error


def by_name(labels: Sequence[str]) -> list[str]:
    """The classes that labels name: in the order of the numbers if all are numbers, else of the alphabet."""
    names = set(labels)
    if all(name.lstrip("-").isdigit() for name in names):
        return sorted(names, key=int)
    return sorted(names)


def index_labels(labels: Sequence[str], class_names: Sequence[str], where: str) -> list[int]:
    """Labels as numbers of classes."""
    numbers = {name: number for number, name in enumerate(class_names)}
    unknown = sorted(set(labels) - numbers.keys())
    if unknown:
        raise DataError(
            f"{where} has labels that do not occur in the train split: {', '.join(map(repr, unknown[:LISTED]))}. "
            f"Add training images of these classes, or remove these rows."
        )
    return [numbers[label] for label in labels]
