"""Datasets by a short text: a name ("digits"), a name with a place ("cifar10:data/cifar"), or a path."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Literal, Protocol
from urllib.parse import parse_qsl

from mixlab.core.errors import DataError, near_misses
from mixlab.data import arrow, cifar, digits, folder, lists, published, shards, vtab
from mixlab.data.base import ImageData
from mixlab.data.kinds import LISTED
from mixlab.data.shards import ShardStream

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")
Spec = str | PathLike[str]
AnyData = ImageData | ShardStream

PATHS = (
    "a folder ROOT/train|val|test/CLASS/*.jpg, a list file (.csv, .tsv, .txt: path,label[,split]) or a folder of "
    "train.csv and val.csv, parquet or arrow files, or tar shards"
)


@dataclass(frozen=True)
class Source:
    """A dataset that was recognized: which splits it has and how one is opened."""

    splits: Callable[[], list[str]]
    open: Callable[[str], AnyData]
    expected: str = f"Expected {PATHS}."


class HasClasses(Protocol):
    class_names: tuple[str, ...]


def published_sources(root: Path) -> dict[str, Source]:
    """Datasets that are called by name, from their files below `root`."""

    def source(splits: Callable[..., list[str]], opener: Callable[..., AnyData], expected: str, *name: str) -> Source:
        return Source(functools.partial(splits, *name, root), functools.partial(opener, *name, root), expected)

    found = {
        name: source(cifar.cifar_splits, cifar.open_cifar, cifar.expected(name), name)
        for name in ("cifar10", "cifar100")
    }
    for name in published.IDX_NAMES:
        found[name] = source(published.idx_splits, published.open_idx, published.IDX_EXPECTED, name)
    found["flowers102"] = source(published.flowers_splits, published.open_flowers, published.FLOWERS_EXPECTED)
    found["cars"] = source(published.cars_splits, published.open_cars, published.CARS_EXPECTED)
    for task in vtab.TASKS:
        found[f"vtab/{task}"] = source(vtab.vtab_splits, vtab.open_vtab, vtab.expected(task), task)
    return found


def open_data(spec: Spec, split: Split) -> AnyData:
    """One split of a dataset. Everything that may be wrong with it is a `DataError`."""
    if split not in SPLITS:
        raise DataError(f"Unknown split {split!r}. Expected one of: {', '.join(SPLITS)}.")
    source = find(spec)
    held = source.splits()
    if not held:
        raise DataError(f"No dataset was found in {str(spec)!r}. {source.expected}")
    if split not in held:
        raise DataError(f"{str(spec)!r} has no {split} split; it has {' and '.join(held)}. {advice(split, held)}")
    data = source.open(split)
    if not len(data):
        raise DataError(f"The {split} split of {str(spec)!r} is empty. {source.expected}")
    if split == "train" and len(data.class_names) < 2:
        raise DataError(
            f"The train split of {str(spec)!r} has one class only, {data.class_names[0]!r}; a classifier needs two or "
            f"more. If this is a folder, check that it is the one that holds the class folders."
        )
    return data


def splits(spec: Spec) -> list[str]:
    """The splits that a dataset has, in the order train, val, test."""
    source = find(spec)
    held = source.splits()
    if not held:
        raise DataError(f"No dataset was found in {str(spec)!r}. {source.expected}")
    return held


def require_same_classes(train: HasClasses, val: HasClasses) -> None:
    """Raise unless both have the same classes in the same order, so that label 3 means the same in both."""
    if train.class_names == val.class_names:
        return
    missing = [name for name in train.class_names if name not in val.class_names]
    extra = [name for name in val.class_names if name not in train.class_names]
    said = [
        f"only in the {where}: {', '.join(map(repr, names[:LISTED]))}{' ...' if len(names) > LISTED else ''}"
        for where, names in (("first", missing), ("second", extra))
        if names
    ]
    raise DataError(
        f"The two splits have different classes ({len(train.class_names)} and {len(val.class_names)}; "
        f"{'; '.join(said) or 'the order differs'}). Both need the same class names; in a folder, a class "
        f"without images in a split still needs its (empty) folder there."
    )


# -- finding -------------------------------------------------------------------------------------


def find(spec: Spec) -> Source:
    text = str(spec)
    if text == "digits":
        return Source(lambda: list(SPLITS), digits.open_digits)
    if isinstance(spec, str):
        name, colon, place = spec.partition(":")
        if colon and not Path(spec).exists() and len(name) > 1:  # a single letter is a drive
            return find_published(name, place)
    bare, _, query = text.partition("?")
    if query and not Path(text).exists() and Path(bare).exists():
        return find_arrow(Path(bare), query)
    path = Path(spec).expanduser()
    if not path.exists():
        raise DataError(unknown(text))
    return recognize(path)


def find_published(name: str, place: str) -> Source:
    root = Path(place).expanduser()
    known = published_sources(root)
    if name == "vtab":
        raise DataError(
            f"'{name}:{place}' stands for 19 datasets, which only `mixlab transfer` takes at once. Name one task: "
            f"'vtab/TASK:{place}', where TASK is one of {', '.join(vtab.TASKS)}."
        )
    if name not in known:
        raise DataError(f"Unknown dataset {name!r}. {near_misses(name, known)} Or give a path to {PATHS}.")
    if not place or not root.is_dir():
        raise DataError(f"{name!r} needs the folder of its files, as in '{name}:PATH'; {place!r} is not a folder.")
    return known[name]


def find_arrow(path: Path, query: str) -> Source:
    columns = dict(parse_qsl(query))
    if not columns or set(columns) - {"image", "label"} or not arrow.is_arrow(path):
        raise DataError(f"After '?' come the columns of parquet or arrow files: '{path}?image=COLUMN&label=COLUMN'.")
    return Source(lambda: arrow.arrow_splits(path), lambda split: arrow.open_arrow(path, split, **columns))


def recognize(path: Path) -> Source:
    """By what a path holds. Class folders come last: looking for them may mean looking at many files."""
    kinds: Sequence[tuple[Callable[[Path], bool], Callable[[Path], list[str]], Callable[[Path, str], AnyData]]] = (
        (arrow.is_arrow, arrow.arrow_splits, arrow.open_arrow),
        (shards.is_shards, shards.shard_splits, shards.open_shards),
        (has_class_splits, folder.folder_splits, folder.open_folder),
        (lists.is_list, lists.list_splits, lists.open_list),
        (Path.is_dir, folder.folder_splits, folder.open_folder),
    )
    for recognizes, held, opener in kinds:
        if recognizes(path):
            return Source(functools.partial(held, path), functools.partial(opener, path))
    raise DataError(f"{path} is no dataset that is known. Expected {PATHS}.")


def has_class_splits(path: Path) -> bool:
    return bool(folder.class_splits(path))


def unknown(text: str) -> str:
    """The error for what is neither a path nor a name."""
    names = ["digits", *published_sources(Path())]
    if text in names:
        return f"{text!r} needs the folder of its files: '{text}:PATH'."
    if "/" in text.removeprefix("vtab/") or "\\" in text or "." in text:
        return f"{text} does not exist. Expected {PATHS}; or a name such as 'digits' or 'cifar10:PATH'."
    return f"Unknown dataset {text!r}, and there is no such path. {near_misses(text, names)}"


def advice(split: str, held: Sequence[str]) -> str:
    if split == "val" and "test" in held:
        return (
            "Validate on 'test' if the dataset's own protocol does; else hold training images out: "
            "move a share of them to a val split, or use mixlab.data.hold_out in Python."
        )
    if split == "train":
        return f"It can be used for evaluation only. For training, put images under ROOT/{split}/CLASS."
    return (
        f"Move a share of the images there: ROOT/{split}/CLASS beside ROOT/train/CLASS for a folder, '{split}' in the "
        f"third column or a {split}.csv beside train.csv for lists, files named {split}-* for shards, parquet and "
        f"arrow; or use mixlab.data.hold_out in Python."
    )
