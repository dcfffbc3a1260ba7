"""Parquet and Arrow files, and folders that `datasets` saved: an image column and a label column."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from mixlab.core.errors import DataError, UnreadableImage
from mixlab.data.base import ImageData
from mixlab.data.folder import SPLIT_NAMES, split_folders
from mixlab.data.images import decode
from mixlab.data.kinds import by_name, check_labels, index_labels, needed
from mixlab.data.lists import SPLIT_OF

SUFFIXES = (".parquet", ".arrow")
IMAGE_NAMES = ("image", "img", "picture", "photo", "jpg", "png", "bytes")
LABEL_NAMES = ("label", "labels", "fine_label", "class", "target", "category")
SAVED_DICT, SAVED = "dataset_dict.json", "state.json"  # what `save_to_disk` writes for several splits and for one

Table = Any  # datasets.Dataset


class ArrowData(ImageData):
    """A table of `datasets`; images are decoded here, so that every kind of file loads as it does from a folder."""

    def __init__(
        self, table: Table, labels: Sequence[int], class_names: Sequence[str], *, image: str, origin: str
    ) -> None:
        self.class_names = tuple(class_names)
        self.table = table
        self.labels = check_labels(labels, len(table), len(class_names), origin)
        self.image = image
        self.origin = origin

    def __len__(self) -> int:
        return len(self.table)

    def label(self, index: int) -> int:
        return int(self.labels[index])

    def read(self, index: int) -> Image.Image:
        cell = self.table[index][self.image]
        raw = cell.get("bytes") if isinstance(cell, dict) else cell
        if raw is None and isinstance(cell, dict) and cell.get("path"):
            return decode(Path(cell["path"]))
        if not isinstance(raw, bytes):
            raise UnreadableImage(f"{self.name(index)} is empty.")
        return decode(raw, name=self.name(index))

    def name(self, index: int) -> str:
        return f"{self.origin}[{index}]"


def is_arrow(path: Path) -> bool:
    if path.is_dir():
        return (path / SAVED_DICT).is_file() or (path / SAVED).is_file() or bool(split_files(path, SUFFIXES))
    return path.suffix.lower() in SUFFIXES


def arrow_splits(path: Path) -> list[str]:
    if (path / SAVED_DICT).is_file():
        return [split for split in SPLIT_NAMES if saved_split(path, split)]
    return ["train"] if (path / SAVED).is_file() else list(split_files(path, SUFFIXES))


def open_arrow(path: Path, split: str, *, image: str = "", label: str = "") -> ArrowData:
    """`image` and `label` name the columns; without them they are found by type and name."""
    table = load(path, split)
    image, label = find_columns(table, path, image, label)
    class_names, labels = read_labels(table, label, path, split)
    datasets = needed("datasets")
    if isinstance(table.features[image], datasets.Image):
        table = table.cast_column(image, datasets.Image(decode=False))
    return ArrowData(table.select_columns([image]), labels, class_names, image=image, origin=f"{path}/{split}")


def load(path: Path, split: str) -> Table:
    datasets = needed("datasets")
    try:
        if (path / SAVED_DICT).is_file():
            return datasets.load_from_disk(str(saved_split(path, split)))
        if (path / SAVED).is_file():
            return datasets.load_from_disk(str(path))
        files = split_files(path, SUFFIXES)[split]
        if files[0].suffix.lower() == ".arrow":
            return datasets.concatenate_datasets([datasets.Dataset.from_file(str(file)) for file in files])
        return datasets.Dataset.from_parquet([str(file) for file in files])
    except Exception as error:  # pyarrow, datasets and the file system each have their own
        raise DataError(f"The {split} split of {path} cannot be read: {error}") from error


def saved_split(path: Path, split: str) -> Path | None:
    return next((path / name for name in SPLIT_NAMES[split] if (path / name).is_dir()), None)


def split_files(path: Path, suffixes: tuple[str, ...]) -> dict[str, list[Path]]:
    """Files by split: named by the file ('train-00000-of-00004.parquet') or by its folder; else training data.

    They lie in the folder itself, in its `data`, or in a folder per split. A single file is a split of its own.
    """
    places = [path, path / "data", *split_folders(path).values()]
    files = (
        [path] if path.is_file() else [file for place in places if place.is_dir() for file in sorted(place.iterdir())]
    )
    found: dict[str, list[Path]] = {split: [] for split in SPLIT_NAMES}
    for file in files:
        if file.name.lower().endswith(suffixes) and not file.name.startswith(".") and file.is_file():
            words = (re.split(r"[-_.]", file.name.lower())[0], file.parent.name.lower())
            found[next((SPLIT_OF[word] for word in words if word in SPLIT_OF), "train")].append(file)
    return {split: held for split, held in found.items() if held}


def find_columns(table: Table, path: Path, image: str, label: str) -> tuple[str, str]:
    datasets = needed("datasets")
    kinds = {"image": datasets.Image, "label": datasets.ClassLabel}
    known = {"image": IMAGE_NAMES, "label": LABEL_NAMES}
    found = {}
    for what, named in (("image", image), ("label", label)):
        typed = [name for name, feature in table.features.items() if isinstance(feature, kinds[what])]
        usual = [name for name in known[what] if name in table.column_names]
        candidates = [named] if named else typed if len(typed) == 1 else usual
        if not candidates or candidates[0] not in table.column_names:
            raise DataError(
                f"No {what} column{f' {named!r}' if named else ''} in {path}; it has {', '.join(table.column_names)}. "
                f"Name the columns: '{path}?image=COLUMN&label=COLUMN'."
            )
        found[what] = candidates[0]
    return found["image"], found["label"]


def read_labels(table: Table, column: str, path: Path, split: str) -> tuple[list[str], list[int]]:
    """Class names and numbers. Without names in the file the classes are those of the train split."""
    feature = table.features[column]
    values = list(table[column])
    if any(value is None for value in values):
        raise DataError(f"{values.count(None)} rows of {path} have no {column}. Remove these rows first.")
    if isinstance(feature, needed("datasets").ClassLabel):
        return list(feature.names), values
    labels = [str(value) for value in values]
    train = labels
    if split != "train" and "train" in arrow_splits(path):
        train = [str(value) for value in load(path, "train")[column]]
    names = by_name(train)
    return names, index_labels(labels, names, f"The {split} split of {path}")
