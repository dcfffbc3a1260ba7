"""Datasets with masks or objects by a short text: "digit-scenes", a name with a place, or a path."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mixlab.core.errors import DataError, near_misses
from mixlab.data import coco, masks, scenes
from mixlab.data.dense import MaskData, ObjectData
from mixlab.data.open import SPLITS, Spec

DenseTask = Literal["segmentation", "detection"]
SCENES = "digit-scenes"
EXPECTED = {
    "segmentation": "'digit-scenes', 'ade20k:PATH', 'cityscapes:PATH', or a folder with images/SPLIT and masks/SPLIT",
    "detection": "'digit-scenes', 'coco:PATH', or a folder in COCO's layout",
}


@dataclass(frozen=True)
class DenseSource:
    splits: Callable[[], list[str]]
    open: Callable[[str], Any]


def open_dense(spec: Spec, split: str, task: str) -> MaskData | ObjectData:
    """One split of a dataset for segmentation or detection. Everything that may be wrong with it is a `DataError`."""
    held = dense_splits(spec, task)
    if split not in held:
        raise DataError(f"{str(spec)!r} has no {split} split for {task}; it has {' and '.join(held) or 'none'}.")
    data: MaskData | ObjectData = find(spec, task).open(split)
    if not len(data):
        raise DataError(f"The {split} split of {str(spec)!r} is empty.")
    return data


def dense_splits(spec: Spec, task: str) -> list[str]:
    """The splits that a dataset has, in the order train, val, test."""
    return find(spec, task).splits()


def find(spec: Spec, task: str) -> DenseSource:
    text = str(spec)
    if text == SCENES:
        opener = scenes.open_scene_masks if task == "segmentation" else scenes.open_scene_objects
        return DenseSource(lambda: list(SPLITS), opener)
    name, colon, place = text.partition(":")
    if colon and not Path(text).exists() and len(name) > 1:
        return find_published(name, Path(place).expanduser(), task)
    path = Path(spec).expanduser()
    if not path.exists():
        raise DataError(f"{text!r} does not exist. For {task}, give {EXPECTED[task]}.")
    recognized = masks.is_masks(path) if task == "segmentation" else coco.is_coco(path)
    if not recognized:
        raise DataError(f"{path} is no dataset for {task} that is known. Expected {EXPECTED[task]}.")
    if task == "segmentation":
        return DenseSource(functools.partial(masks.mask_splits, path), functools.partial(masks.open_mask_data, path))
    return DenseSource(functools.partial(coco.coco_splits, path), functools.partial(coco.open_coco, path))


def find_published(name: str, root: Path, task: str) -> DenseSource:
    known: dict[str, Callable[[Path, str], Any]]
    known = (
        {"ade20k": masks.open_ade20k, "cityscapes": masks.open_cityscapes}
        if task == "segmentation"
        else {"coco": coco.open_coco}
    )
    if name not in known:
        raise DataError(f"Unknown dataset {name!r} for {task}. {near_misses(name, [SCENES, *known])}")
    if not root.is_dir():
        raise DataError(f"{name!r} needs the folder of its files, as in '{name}:PATH'; {str(root)!r} is not a folder.")
    held = masks.mask_splits if task == "segmentation" else coco.coco_splits
    return DenseSource(functools.partial(held, root), functools.partial(known[name], root))
