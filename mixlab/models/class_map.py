"""A classifier made from rows of a larger one: which row each class takes is a list, or a file of a line per class."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mixlab.core.errors import ConfigError, near_misses
from mixlab.models.fitting import CLASSIFIER

MISSING = -1  # the row of a class without a counterpart: it gets the mean of all rows
MARK = "-"  # the same in a file
IMAGENET21K = "imagenet21k"  # instead of a file


def map_classifier(
    tensors: Mapping[str, Tensor], class_map: Sequence[int], origin: str, num_classes: int
) -> dict[str, Tensor]:
    """Return tensors whose last linear layer has the rows that a map names."""
    if len(class_map) != num_classes:
        raise ConfigError(f"A class map has a row for each class: {num_classes} are needed; got {len(class_map)}.")
    keys = [key for key in tensors if key.startswith(CLASSIFIER)]
    if not keys:
        raise ConfigError(f"{origin} has no classifier whose rows a class map could take.")
    return {**tensors, **{key: rows_of(tensors[key], class_map, origin) for key in keys}}


def rows_of(values: Tensor, class_map: Sequence[int], origin: str) -> Tensor:
    """Take the rows (classes, ...) of a weight or a bias."""
    wrong = [row for row in class_map if not MISSING <= row < len(values)]
    if wrong:
        raise ConfigError(
            f"The classifier of {origin} has rows 0 to {len(values) - 1}; the class map names {wrong[0]}."
        )
    rows = torch.tensor(class_map, device=values.device)
    taken = values[rows.clamp(min=0)]
    taken[rows == MISSING] = values.mean(0)
    return taken


def read_class_map(path: str, names: Sequence[str], weights: str) -> tuple[int, ...]:
    """Read the row of each class from a file.

    A line has a row of the larger classifier, the name of one of its classes, or "-" for none, in the order of the
    classes; or it has the name of a class, a tab, and one of these. Empty lines and comments (#) are skipped.
    "imagenet21k" in place of a file is for WordNet names ("n01440764") and the 21,841 classes in alphabetical order.
    """
    if path == IMAGENET21K:
        return imagenet21k_rows(names)
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The class map {path} cannot be read: {error}") from error
    mapped = [line for line in lines if line.strip() and not line.startswith("#")]
    entries = [line.split("\t") for line in mapped]
    if any(len(entry) > 2 for entry in entries) or len({len(entry) for entry in entries}) > 1:
        raise ConfigError(f"Each line of {path} is ROW, or CLASS, a tab and ROW; all lines are of one kind.")
    if entries and len(entries[0]) == 2:
        entries = in_order(path, entries, names)
    if len(entries) != len(names):
        raise ConfigError(f"{path} maps {len(entries)} classes; the data has {len(names)}.")
    source = source_names(weights) if any(not is_row(entry[-1].strip()) for entry in entries) else {}
    return tuple(row_of(entry[-1].strip(), source, path) for entry in entries)


def imagenet21k_rows(names: Sequence[str]) -> tuple[int, ...]:
    from timm.data import ImageNetInfo

    rows = {name: row for row, name in enumerate(ImageNetInfo("imagenet-22k").label_names())}
    if not any(name in rows for name in names):
        raise ConfigError(
            f"The class map {IMAGENET21K!r} knows WordNet names such as 'n01440764'; the data has none, but "
            f"{', '.join(names[:3])}, ... Give a file."
        )
    return tuple(rows.get(name, MISSING) for name in names)


def in_order(path: str, entries: Sequence[Sequence[str]], names: Sequence[str]) -> list[list[str]]:
    """Return the rows of lines that name classes, in the order of the classes."""
    rows: dict[str, str] = {}
    for name, row in entries:
        if name.strip() not in names:
            raise ConfigError(f"{path} maps {name.strip()!r}, which the data does not have. {near_misses(name, names)}")
        if name.strip() in rows:
            raise ConfigError(f"{path} maps {name.strip()!r} twice.")
        rows[name.strip()] = row
    missing = [name for name in names if name not in rows]
    if missing:
        raise ConfigError(
            f"{path} says nothing of {len(missing)} classes, such as {missing[0]!r}. Each needs a line, with {MARK!r} "
            f"for a class without a counterpart."
        )
    return [[rows[name]] for name in names]


def is_row(text: str) -> bool:
    return text == MARK or text.isdecimal()


def row_of(text: str, source: Mapping[str, int], path: str) -> int:
    if text == MARK:
        return MISSING
    if text in source:
        return source[text]
    if text.isdecimal():
        return int(text)
    if not source:
        raise ConfigError(f"{path} names {text!r}, but the weights do not know their classes. Give numbers of rows.")
    raise ConfigError(f"{path} names {text!r}, a class that the weights do not have. {near_misses(text, source)}")


def source_names(weights: str) -> dict[str, int]:
    """Return the row of each class of a weight file; empty if the file does not name its classes."""
    from mixlab.core.errors import WeightsError
    from mixlab.models.weights import read_about

    try:
        return {name: row for row, name in enumerate(read_about(weights).class_names)}
    except WeightsError:  # a file of other code
        return {}
