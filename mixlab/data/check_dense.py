"""Look through a dataset with masks or objects and say what is wrong with it."""

import itertools
from collections import Counter
from collections.abc import Iterator

import numpy as np

from mixlab.core.errors import DataError, UnreadableImage
from mixlab.data.check import DataReport, Progress
from mixlab.data.coco import CocoObjects, object_problems
from mixlab.data.dense import IGNORE, MaskData, ObjectData
from mixlab.data.masks import mask_problems
from mixlab.data.open import Spec
from mixlab.data.open_dense import dense_splits, open_dense


def check_dense(spec: Spec, task: str, *, progress: Progress | None = None) -> DataReport:
    """Images, images per class and problems of every split. Only what cannot be opened at all raises."""
    report = DataReport(str(spec))
    opened: dict[str, MaskData | ObjectData] = {}
    for split in dense_splits(spec, task):
        try:
            opened[split] = open_dense(spec, split, task)
        except DataError as error:
            report.problems.append(f"{split}: {error}")
    report.splits = {split: len(data) for split, data in opened.items()}
    total, done = sum(report.splits.values()), 0
    for split, data in opened.items():
        counts: Counter[int] = Counter()
        for classes in images_by_class(data):
            counts.update(classes)
            done += 1
            if progress is not None:
                progress(done, total)
        for number, name in enumerate(data.class_names):
            report.classes.setdefault(name, {})[split] = counts[number]
        report.problems += [f"{split}: {problem}" for problem in problems_of(data)]
    return report


def images_by_class(data: MaskData | ObjectData) -> Iterator[set[int]]:
    """The classes in each image; none of one that cannot be read."""
    if isinstance(data, CocoObjects):  # without reading images
        listing = data.listing
        for first, end in itertools.pairwise(listing.starts.tolist()):
            yield set(listing.labels[first:end].tolist())
        return
    for index in range(len(data)):
        try:
            if isinstance(data, MaskData):
                yield set(np.unique(data.read(index).mask).tolist()) - {IGNORE}
            else:
                yield set(data.read(index).objects.labels.tolist())
        except (UnreadableImage, DataError):
            yield set()


def problems_of(data: MaskData | ObjectData) -> Iterator[str]:
    if isinstance(data, MaskData):
        return mask_problems(data)
    return object_problems(data) if isinstance(data, CocoObjects) else iter(())
