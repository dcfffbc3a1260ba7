"""List files: one image per line with path, label and, if the file holds several splits, the split.

A folder of `train.csv`, `val.csv` and `test.csv` is one dataset too.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mixlab.core.errors import DataError
from mixlab.data.folder import SPLIT_NAMES
from mixlab.data.kinds import FileData, by_name, index_labels

SUFFIXES = (".csv", ".tsv", ".txt")
HEADERS = {
    "path": ("path", "file", "filename", "file_name", "image", "image_path", "img"),
    "label": ("label", "class", "target", "category", "y"),
    "split": ("split", "set", "subset"),
}
SPLIT_OF = {alias: split for split, aliases in SPLIT_NAMES.items() for alias in aliases}


@dataclass(frozen=True)
class ListRow:
    path: Path
    label: str
    split: str


def is_list(path: Path) -> bool:
    """A list file, or a folder of one list per split."""
    if path.is_dir():
        return bool(split_lists(path))
    return path.suffix.lower() in SUFFIXES


def list_splits(path: Path) -> list[str]:
    held = {row.split for row in read_rows(path)}
    return [split for split in SPLIT_NAMES if split in held]


def open_list(path: Path, split: str) -> FileData:
    """The classes are those of the train split, so that every split numbers them alike."""
    rows = read_rows(path)
    own = [row for row in rows if row.split == split]
    train = [row.label for row in rows if row.split == "train"]
    names = by_name(train or [row.label for row in own])
    labels = index_labels([row.label for row in own], names, f"The {split} split of {path}")
    return FileData([row.path for row in own], labels, names)


def read_rows(path: Path) -> list[ListRow]:
    if path.is_dir():
        return [row for split, file in split_lists(path).items() for row in read_list(file, split)]
    return read_list(path, SPLIT_OF.get(path.stem.lower(), "train"))


def split_lists(folder: Path) -> dict[str, Path]:
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES)
    return {SPLIT_OF[file.stem.lower()]: file for file in files if file.stem.lower() in SPLIT_OF}


def read_list(path: Path, default_split: str) -> list[ListRow]:
    """Rows of one file; without a split column all belong to `default_split`."""
    cells = read_cells(path)
    columns = read_header(cells[0]) if cells else None
    places = columns or {"path": 0, "label": 1, "split": 2}
    rows = []
    for number, cell in enumerate(cells[1:] if columns else cells, start=2 if columns else 1):
        if len(cell) <= max(places["path"], places["label"]):
            raise DataError(
                f"Row {number} of {path} is {' '.join(cell)!r}; expected path and label, divided by "
                f"{'commas' if path.suffix.lower() == '.csv' else 'tabs or spaces'}. Paths with spaces need a .csv."
            )
        split = cell[places["split"]] if places.get("split", len(cell)) < len(cell) else default_split
        if split.lower() not in SPLIT_OF:
            raise DataError(f"Row {number} of {path} has the split {split!r}; expected train, val or test.")
        rows.append(ListRow(path.parent / cell[places["path"]], cell[places["label"]], SPLIT_OF[split.lower()]))
    return rows


def read_cells(path: Path) -> list[list[str]]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"The list {path} cannot be read as text: {error}. Expected one path and label per line."
        ) from error
    delimiter = {".csv": ",", ".tsv": "\t"}.get(path.suffix.lower()) or guess_delimiter(lines[:1])
    rows = csv.reader(lines, delimiter=delimiter) if delimiter else (line.split() for line in lines)
    return [[cell.strip() for cell in row] for row in rows]


def guess_delimiter(first: list[str]) -> str | None:
    """Of a .txt file; None for any white space."""
    return next((delimiter for delimiter in "\t," if delimiter in "".join(first)), None)


def read_header(cells: Sequence[str]) -> dict[str, int] | None:
    """Column numbers by what they hold, if the first row names them."""
    names = [cell.lower() for cell in cells]
    found = {
        what: next(index for index, name in enumerate(names) if name in known)
        for what, known in HEADERS.items()
        if any(name in known for name in names)
    }
    return found if {"path", "label"} <= found.keys() else None
