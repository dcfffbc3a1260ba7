"""Other test sets of ImageNet from their folders: -A, -R, -Sketch, -V2, a prepared ImageNet-C, and the labels of -Real.

Labels are places in a model's scores: by the names of its classes if it has them, else by ImageNet's order.
"""

import functools
import json
import pkgutil
import re
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from mixlab.core.errors import DataError, MixlabError
from mixlab.data.base import ImageData
from mixlab.data.folder import images_below, visible_folders
from mixlab.data.kinds import LISTED, FileData
from mixlab.evals.quality.corruptions import group_of
from mixlab.evals.subjects import Subject

VARIANTS = ("a", "r", "sketch", "v2")
SUBSETS = {"a": "imagenet_a_synsets.txt", "r": "imagenet_r_synsets.txt"}  # lists that timm ships
IMAGENET_CLASSES = 1000
SHIPPED = "timm"  # the word for timm's copy of real.json
REAL_LABELS = "imagenet_real_labels.json"
IMAGE_NUMBER = re.compile(r"val_(\d{8})", re.IGNORECASE)


@dataclass(frozen=True)
class Variant:
    """Images with labels, and the only classes that the scores are compared over, if not all."""

    data: FileData
    classes: tuple[int, ...] | None = None


def shipped(name: str) -> str:
    """A list of timm's."""
    try:
        found = pkgutil.get_data("timm.data", f"_info/{name}")
    except OSError:
        found = None
    if found is None:
        raise MixlabError(f"This release of timm has no list {name}; use timm 1.0.15 or a newer one.")
    return found.decode()


@functools.cache
def imagenet_places() -> dict[str, int]:
    """The number of each of ImageNet's 1000 classes by its WordNet name."""
    from timm.data import ImageNetInfo

    return {name: number for number, name in enumerate(ImageNetInfo().label_names())}


def open_variant(kind: str, folder: str | PathLike[str], subject: Subject) -> Variant:
    """`kind` is one of `VARIANTS`; the folder holds one folder per class."""
    root = Path(folder)
    subset = None
    if kind in SUBSETS:
        names = shipped(SUBSETS[kind]).split()
        foreign = sorted({place.name for place in class_folders(root)} - set(names))
        if foreign:
            raise DataError(
                f"{root} is not ImageNet-{kind.upper()}: {', '.join(map(repr, foreign[:LISTED]))} are not among its "
                f"{len(names)} classes. Expected folders such as {names[0]}."
            )
        subset = tuple(sorted(class_places(names, subject, str(root))))
    return Variant(open_classes(root, subject), subset)


def open_prepared(root: str | PathLike[str], corruption: str, severity: int, subject: Subject) -> FileData:
    """ROOT/[GROUP/]CORRUPTION/SEVERITY/CLASS/*, as ImageNet-C is unpacked."""
    places = [Path(root, *above, corruption, str(severity)) for above in ((), (group_of(corruption),))]
    found = [place for place in places if place.is_dir()]
    if not found:
        raise DataError(
            f"{root} has no {corruption} at severity {severity}. Expected class folders in {places[0]} or {places[1]}."
        )
    return open_classes(found[0], subject)


def open_classes(root: Path, subject: Subject) -> FileData:
    """Class folders whose labels are places in the subject's scores."""
    folders = class_folders(root)
    labels = class_places([place.name for place in folders], subject, str(root))
    files = [(path, label) for place, label in zip(folders, labels, strict=True) for path in images_below(place)]
    if not files:
        raise DataError(f"No images in the class folders of {root}.")
    names = [str(number) for number in range(subject.num_classes)]
    return FileData([path for path, _ in files], [label for _, label in files], names)


def class_folders(root: Path) -> list[Path]:
    folders = visible_folders(root)
    if not folders:
        raise DataError(f"{root} holds no class folders." if root.is_dir() else f"{root} is not a folder.")
    return folders


def class_places(names: Sequence[str], subject: Subject, where: str) -> list[int]:
    """Where the scores of classes stand that folders name: by class name, WordNet name or number."""
    count = subject.num_classes
    if subject.class_names:
        known = {name: number for number, name in enumerate(subject.class_names)}
        # trained on folders of WordNet names: ImageNet-V2 has numbers
        if count == IMAGENET_CLASSES and known.keys() == imagenet_places().keys():
            known |= {str(number): known[name] for name, number in imagenet_places().items()}
    elif count == IMAGENET_CLASSES and any(name in imagenet_places() for name in names):
        known = imagenet_places()
    elif all(name.isdecimal() for name in names):  # ImageNet-V2 numbers its folders, without leading zeros
        known = {name: int(name) for name in names if int(name) < count}
    else:  # the order of names, as in any dataset of folders
        known = {name: number for number, name in enumerate(sorted(names))} if len(names) == count else {}
    unknown = [name for name in names if name not in known]
    if unknown:
        expected = (
            f"Expected folders named as its own classes, such as {subject.class_names[0]!r}."
            if subject.class_names
            else f"Expected folders named by WordNet (n01440764), for a model of ImageNet's 1000 classes, or by "
            f"numbers from 0 to {count - 1}; it tells {count} classes apart."
        )
        raise DataError(
            f"{subject.name} does not know the classes {', '.join(map(repr, unknown[:LISTED]))} of {where}. {expected}"
        )
    return [known[name] for name in names]


# -- ImageNet-Real -------------------------------------------------------------------------------


def read_real(source: str | PathLike[str], classes: int) -> list[list[int]]:
    """The labels of each of ImageNet's validation images, from `real.json` or "timm" for the copy that timm ships."""
    try:
        text = shipped(REAL_LABELS) if str(source) == SHIPPED else Path(source).read_text(encoding="utf-8")
        found = json.loads(text)
    except OSError as error:
        raise DataError(f"The labels {source} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise DataError(f"{source} is no JSON file: {error}") from error
    fits = isinstance(found, list) and all(
        isinstance(row, list) and all(isinstance(label, int) and 0 <= label < classes for label in row) for row in found
    )
    if not fits or not found:
        raise DataError(f"{source} is not real.json: expected a list of labels from 0 to {classes - 1} for each image.")
    return found


def real_labels(data: ImageData, rows: Sequence[Sequence[int]]) -> list[frozenset[int]]:
    """For each image of the data the labels that count as right; the number in its name says which image it is."""
    labels = []
    for index in range(len(data)):
        name = Path(data.name(index)).stem
        number = IMAGE_NUMBER.search(name)
        if number is None or not 1 <= int(number[1]) <= len(rows):
            raise DataError(
                f"ImageNet-Real needs the validation images by their own names, ILSVRC2012_val_00000001 to "
                f"{len(rows):08d}; got {data.name(index)!r}."
            )
        labels.append(frozenset(rows[int(number[1]) - 1]))
    return labels
