"""A file of annotations in COCO's format as arrays: hundreds of thousands of objects in little memory."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from mixlab.core.errors import DataError
from mixlab.data.kinds import LISTED, Array
from mixlab.data.outlines import RunLengths, pack

NO_BOX = (0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Listing:
    """A file of annotations as arrays, its objects in the order of their images."""

    path: Path
    files: list[str]
    sizes: Array  # (images, 2) int: width, height; 0 where the file does not say
    starts: Array  # (images + 1,) int: the objects of image i are those from starts[i] to starts[i + 1]
    boxes: Array  # (objects, 4) float32: left, top, right, bottom as given; zeros where there was no box
    labels: Array  # (objects,) int64
    crowd: Array  # (objects,) bool
    area: Array  # (objects,) float32; NaN where the file does not say
    outlines: RunLengths
    class_names: tuple[str, ...]
    strays: int  # objects of images that are not listed
    repeated: int  # objects with the id of another


def read_listing(path: Path) -> Listing:
    content = read_json(path)
    names, classes = read_categories(content["categories"], path)
    numbers = number_images(content["images"], path)
    entries = content["annotations"]
    require_keys(entries, ("image_id", "category_id"), "annotation", path)
    unknown = {entry["category_id"] for entry in entries} - classes.keys()
    if unknown:
        raise DataError(
            f"{path} has objects of category ids that it does not list: {some(sorted(unknown, key=str))}. "
            f"Add them to its categories, or remove these objects."
        )
    owned = sorted((entry for entry in entries if entry["image_id"] in numbers), key=lambda e: numbers[e["image_id"]])
    boxes = np.array([corners(entry.get("bbox")) for entry in owned], dtype=np.float32).reshape(-1, 4)
    if entries and not positive(boxes).any():
        raise DataError(
            f"None of the {len(entries)} objects of {path} has a listed image and a box. "
            f"Expected 'bbox': [left, top, width, height] in pixels, with a width and a height above 0."
        )
    counts = np.bincount([numbers[entry["image_id"]] for entry in owned], minlength=len(numbers))
    return Listing(
        path=path,
        files=[str(image["file_name"]) for image in content["images"]],
        sizes=np.array([sides(image) for image in content["images"]]),
        starts=np.concatenate(([0], np.cumsum(counts))),
        boxes=boxes,
        labels=np.array([classes[entry["category_id"]] for entry in owned], dtype=np.int64),
        crowd=np.array([bool(entry.get("iscrowd")) for entry in owned], dtype=np.bool_),
        area=np.array([area_of(entry) for entry in owned], dtype=np.float32),
        outlines=RunLengths(entry.get("segmentation", b"") for entry in owned),
        class_names=names,
        strays=len(entries) - len(owned),
        repeated=sum(count - 1 for key, count in Counter(e.get("id") for e in entries).items() if key is not None),
    )


def read_json(path: Path) -> dict[str, list[Any]]:
    try:
        content = json.loads(path.read_bytes(), object_hook=pack)
    except OSError as error:
        raise DataError(f"The annotations {path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not a JSON file: {error}. Was it downloaded whole?") from error
    for key in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise DataError(f"{path} has no list of {key!r}. Expected COCO's format of object annotations.")
    return content


def read_categories(entries: Sequence[Any], path: Path) -> tuple[tuple[str, ...], dict[Any, int]]:
    """Class names, and the class of each category id."""
    require_keys(entries, ("id", "name"), "category", path)
    refuse_repeated([entry["id"] for entry in entries], "category", path)
    if not entries or not all(type(entry["id"]) is int for entry in entries):
        raise DataError(f"{path} needs one category or more, each with a whole number as its id.")
    ordered = sorted(entries, key=lambda entry: int(entry["id"]))
    return tuple(str(entry["name"]) for entry in ordered), {entry["id"]: n for n, entry in enumerate(ordered)}


def number_images(entries: Sequence[Any], path: Path) -> dict[Any, int]:
    """Where each image id is in the list."""
    require_keys(entries, ("id", "file_name"), "image", path)
    refuse_repeated([entry["id"] for entry in entries], "image", path)
    if not entries:
        raise DataError(f"{path} lists no images.")
    return {entry["id"]: number for number, entry in enumerate(entries)}


# -- entries -------------------------------------------------------------------------------------


def require_keys(entries: Sequence[Any], keys: tuple[str, ...], what: str, path: Path) -> None:
    """Ids and names are numbers or text; anything else makes the file something else than it should be."""
    for number, entry in enumerate(entries):
        for key in keys:
            if not isinstance(entry, dict) or type(entry.get(key)) not in (int, str):
                raise DataError(f"The {what} number {number} of {path} has no usable {key!r}: {str(entry)[:80]}")


def refuse_repeated(ids: Sequence[Any], what: str, path: Path) -> None:
    repeated = [key for key, count in Counter(ids).items() if count > 1]
    if repeated:
        raise DataError(
            f"{path} has more than one {what} with the same id: {some(repeated)}. It is then unknown which one an "
            f"object belongs to; give each an id of its own."
        )


def corners(box: Any) -> tuple[float, ...]:
    """Left, top, width and height as left, top, right, bottom; what is no box becomes one without size."""
    if not isinstance(box, list) or len(box) != 4 or not all(map(is_number, box)):
        return NO_BOX
    left, top, width, height = box
    return left, top, left + width, top + height


def sides(image: dict[str, Any]) -> tuple[int, int]:
    """Width and height, or zeros if they are not both given."""
    width, height = image.get("width"), image.get("height")
    if not (is_number(width) and is_number(height) and min(width, height) > 0):
        return 0, 0
    return int(width), int(height)


def area_of(entry: dict[str, Any]) -> float:
    area = entry.get("area")
    return float(area) if is_number(area) and area > 0 else math.nan


def is_number(value: Any) -> TypeGuard[int | float]:
    return type(value) in (int, float) and math.isfinite(value)


def positive(boxes: Array) -> Array:
    """Which boxes have a width and a height, (N,) bool."""
    return (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])


def some(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values[:LISTED])) + (" ..." if len(values) > LISTED else "")
