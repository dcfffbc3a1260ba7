"""Folders of images: ROOT/train|val|test/CLASS/..., or ROOT/CLASS/... for training images alone."""

import os
from collections.abc import Iterator
from pathlib import Path

from mixlab.core.errors import DataError
from mixlab.data.kinds import FileData

EXTENSIONS = frozenset(
    (".bmp", ".gif", ".jfif", ".jp2", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp")
)
SPLIT_NAMES = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}


def folder_splits(root: Path) -> list[str]:
    """The splits that a folder holds; class folders without splits are training images."""
    found = list(class_splits(root))
    return found or (["train"] if any(True for folder in visible_folders(root) for _ in walk(folder)) else [])


def class_splits(root: Path) -> dict[str, Path]:
    """Folders named as splits, if class folders are in them; a class may be called 'train' too."""
    found = split_folders(root)
    return found if any(visible_folders(place) for place in found.values()) else {}


def open_folder(root: Path, split: str) -> FileData:
    place = class_splits(root).get(split, root)
    classes = visible_folders(place)
    files = [(path, label) for label, folder in enumerate(classes) for path in images_below(folder)]
    if not files:
        raise DataError(
            f"No images in {place}. Expected {place}/CLASS/*.jpg with one folder per class "
            f"(extensions: {', '.join(sorted(EXTENSIONS))})."
        )
    return FileData([path for path, _ in files], [label for _, label in files], [folder.name for folder in classes])


def split_folders(root: Path) -> dict[str, Path]:
    found = {folder.name.lower(): folder for folder in visible_folders(root)}
    named = {split: [found[name] for name in names if name in found] for split, names in SPLIT_NAMES.items()}
    return {split: folders[0] for split, folders in named.items() if folders}


def visible_folders(root: Path) -> list[Path]:
    """Folders in it, in the order of their names; hidden ones are not looked at."""
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def images_below(folder: Path) -> list[Path]:
    return sorted(walk(folder))


def walk(folder: Path) -> Iterator[Path]:
    for place, inner, files in os.walk(folder, followlinks=True):
        inner[:] = [name for name in inner if not name.startswith(".")]
        for file in files:
            if not file.startswith(".") and os.path.splitext(file)[1].lower() in EXTENSIONS:
                yield Path(place, file)
