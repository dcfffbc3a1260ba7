"""Outlines of objects as COCO files hold them: polygons or run lengths, kept packed until a mask is asked for."""

import importlib
import math
import pickle
from collections.abc import Iterable
from typing import Any

import numpy as np

from mixlab.core.errors import DataError
from mixlab.data.kinds import Array

CORNERS = 3  # that a polygon has at least


class RunLengths:
    """Many outlines in one block of memory, which worker processes share; objects of their own they would copy."""

    def __init__(self, outlines: Iterable[bytes]) -> None:
        parts = list(outlines)
        self.ends = np.cumsum([0, *map(len, parts)])
        self.block = b"".join(parts)

    def __getitem__(self, number: int) -> Any:
        """The outline as it was in the file; None where there was none."""
        start, end = self.ends[number], self.ends[number + 1]
        return pickle.loads(self.block[start:end]) if end > start else None

    def given(self) -> Array:
        """Which outlines there are, (N,) bool."""
        return np.diff(self.ends) > 0


def pack(entry: dict[str, Any]) -> dict[str, Any]:
    """For the JSON reader: an object's outline becomes bytes at once, as its numbers would take ten times the room."""
    if "segmentation" in entry:
        outline = entry["segmentation"]
        entry["segmentation"] = pickle.dumps(outline, protocol=5) if outline else b""
    return entry


def rasterise(outline: Any, height: int, width: int) -> Array | None:
    """Mask of an outline, (H, W) uint8, pixel by pixel as COCO's own code draws it; None if it does not fit."""
    api = mask_api()
    try:
        if isinstance(outline, dict):
            if list(outline["size"]) != [height, width]:
                return None
            listed = isinstance(outline["counts"], list)
            return np.asarray(api.decode(api.frPyObjects(outline, height, width) if listed else outline))
        polygons = [polygon for polygon in outline or () if is_polygon(polygon)]
        return np.asarray(api.decode(api.merge(api.frPyObjects(polygons, height, width)))) if polygons else None
    except (KeyError, TypeError, ValueError, RuntimeError):  # what is wrong with run lengths shows when they are read
        return None


def is_sound(outline: Any, height: int, width: int) -> bool:
    """Whether `rasterise` has a mask for it, without drawing polygons."""
    if isinstance(outline, list):
        return any(is_polygon(polygon) for polygon in outline)
    return rasterise(outline, height, width) is not None


def is_polygon(values: Any) -> bool:
    """x, y, x, y ... of three corners or more."""
    return (
        isinstance(values, list)
        and len(values) >= 2 * CORNERS
        and len(values) % 2 == 0
        and all(type(value) in (int, float) and math.isfinite(value) for value in values)
    )


def mask_api() -> Any:
    try:
        return importlib.import_module("faster_coco_eval.core.mask")
    except ImportError as error:
        raise DataError(
            "Masks from COCO files need the package faster-coco-eval, which is not installed. "
            "Run: pip install 'mixlab[dense]'"
        ) from error
