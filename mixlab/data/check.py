"""Look at every image of a dataset once and say what is wrong with it."""

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, NamedTuple, cast

from PIL import Image

from mixlab.core.errors import DataError, UnreadableImage
from mixlab.data.base import ImageData
from mixlab.data.images import STORED_MODE, decode
from mixlab.data.open import AnyData, Spec, Split, open_data, splits
from mixlab.data.shards import ShardStream

Progress = Callable[[int, int], None]  # images done, images in all

LISTED = 5
CHUNK = 256  # images between two reports of progress
IMBALANCE = 20  # the largest class over the smallest
FEW = 2  # images of a class


class ImageLook(NamedTuple):
    """What one image showed. No size if it is unreadable; `note` then says why."""

    name: str
    label: int
    size: tuple[int, int] | None = None
    mode: str = ""
    content: bytes = b""
    note: str = ""


@dataclass
class DataReport:
    """What a dataset holds, and what is wrong with it."""

    spec: str
    splits: dict[str, int] = field(default_factory=dict)  # images
    classes: dict[str, dict[str, int]] = field(default_factory=dict)  # class, split, images
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)  # min, median and max of (width, height)
    modes: dict[str, int] = field(default_factory=dict)  # as stored
    unreadable: dict[str, str] = field(default_factory=dict)  # name, reason
    duplicates: list[list[str]] = field(default_factory=list)  # the same pixels in more than one split
    problems: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """JSON-ready data."""
        return asdict(self) | {"sizes": {what: list(size) for what, size in self.sizes.items()}}

    def text(self) -> str:
        counts = ", ".join(f"{split} {count}" for split, count in self.splits.items())
        sizes = ", ".join(f"{what} {width} x {height}" for what, (width, height) in self.sizes.items())
        lines = [f"{self.spec}: {len(self.classes)} classes; images: {counts}"]
        lines += [f"sizes: {sizes}"] if sizes else []
        lines += [f"modes: {', '.join(f'{mode} {count}' for mode, count in self.modes.items())}"] if self.modes else []
        width = max((len(name) for name in self.classes), default=0)
        for name, held in self.classes.items():
            lines.append(f"  {name:{width}}  " + "  ".join(f"{split} {count}" for split, count in held.items()))
        lines.append(f"{len(self.problems)} problems:" if self.problems else "No problems.")
        return "\n".join(lines + [f"- {problem}" for problem in self.problems])


def check_data(spec: Spec, *, progress: Progress | None = None, threads: int = 0) -> DataReport:
    """Read everything. Only a dataset that cannot be opened at all raises; the rest is in the report."""
    report = DataReport(str(spec))
    opened = open_splits(spec, report)
    report.splits = {split: len(data) for split, data in opened.items()}
    total, done = sum(report.splits.values()), 0
    looks: dict[str, list[ImageLook]] = {}
    with ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1)) as pool:
        for split, data in opened.items():
            looks[split] = []
            for part in look_at(data, pool):
                looks[split] += part
                done += len(part)
                if progress:
                    progress(done, max(total, done))
    report.splits = {split: len(seen) for split, seen in looks.items()}  # a stream's length was an estimate
    describe(report, opened, looks)
    report.problems += find_problems(report, opened)
    return report


def open_splits(spec: Spec, report: DataReport) -> dict[str, AnyData]:
    opened: dict[str, AnyData] = {}
    for split in splits(spec):
        try:
            opened[split] = open_data(spec, cast(Split, split))
        except DataError as error:
            report.problems.append(str(error))
    return opened


# -- looking -------------------------------------------------------------------------------------


def look_at(data: AnyData, pool: ThreadPoolExecutor) -> Iterator[list[ImageLook]]:
    if isinstance(data, ShardStream):
        for sample in data.samples(train=False, seed=0, epoch=0):
            yield [look(sample.name, sample.label, lambda raw=sample.raw: decode(raw))]  # type: ignore[misc]
        return
    for first in range(0, len(data), CHUNK):
        indices = range(first, min(first + CHUNK, len(data)))
        yield list(pool.map(lambda index: look_up(data, index), indices))


def look_up(data: ImageData, index: int) -> ImageLook:
    return look(data.name(index), data.label(index), lambda: data.read(index))


def look(name: str, label: int, read: Callable[[], Image.Image]) -> ImageLook:
    try:
        image = read()
    except UnreadableImage as error:
        return ImageLook(name, label, note=str(error))
    content = hashlib.blake2b(image.tobytes() + repr((image.size, image.mode)).encode(), digest_size=16).digest()
    return ImageLook(name, label, image.size, image.info.get(STORED_MODE, image.mode), content)


# -- the report ----------------------------------------------------------------------------------


def describe(report: DataReport, opened: Mapping[str, AnyData], looks: Mapping[str, Sequence[ImageLook]]) -> None:
    names = dict.fromkeys(name for data in opened.values() for name in data.class_names)
    counts = {split: Counter(seen.label for seen in looks[split]) for split in opened}
    numbers = {split: {name: number for number, name in enumerate(data.class_names)} for split, data in opened.items()}
    report.classes = {
        name: {split: counts[split][numbers[split][name]] for split in opened if name in numbers[split]}
        for name in names
    }
    everything = [seen for part in looks.values() for seen in part]
    report.unreadable = {seen.name: seen.note for seen in everything if seen.size is None}
    report.modes = dict(Counter(seen.mode for seen in everything if seen.mode).most_common())
    report.sizes = measure([seen.size for seen in everything if seen.size])
    report.duplicates = find_duplicates(looks)


def measure(sizes: Sequence[tuple[int, int]]) -> dict[str, tuple[int, int]]:
    if not sizes:
        return {}
    widths, heights = zip(*sizes, strict=True)
    ways: tuple[tuple[str, Callable[[Any], float]], ...] = (("min", min), ("median", median), ("max", max))
    return {what: (round(way(widths)), round(way(heights))) for what, way in ways}


def find_duplicates(looks: Mapping[str, Sequence[ImageLook]]) -> list[list[str]]:
    places: dict[bytes, dict[str, str]] = defaultdict(dict)
    for split, part in looks.items():
        for seen in part:
            if seen.content:
                places[seen.content].setdefault(split, seen.name)
    return [list(found.values()) for found in places.values() if len(found) > 1]


# -- problems ------------------------------------------------------------------------------------


def find_problems(report: DataReport, opened: Mapping[str, AnyData]) -> list[str]:
    return [
        *file_problems(report),
        *class_problems(report, list(opened)),
        *balance_problems(report),
        *name_problems(list(report.classes)),
    ]


def file_problems(report: DataReport) -> Iterator[str]:
    if report.unreadable:
        yield (
            f"{len(report.unreadable)} images cannot be read: {some(list(report.unreadable))}. "
            f"Remove or replace them; training skips them."
        )
    if report.duplicates:
        pairs = some([" = ".join(found) for found in report.duplicates])
        yield (
            f"{len(report.duplicates)} images are in more than one split: {pairs}. "
            f"Remove them from train, else the test result is too good."
        )


def class_problems(report: DataReport, held: Sequence[str]) -> Iterator[str]:
    if len(report.classes) < 2 and held:
        yield "There is one class only. A classifier needs two or more: check which folder holds the class folders."
    for split in held:
        missing = [name for name, counts in report.classes.items() if not counts.get(split)]
        if missing:
            yield (
                f"{len(missing)} classes have no images in {split}: {some(missing)}. Add images of them to {split}"
                f"{'.' if split == 'train' else ', or know that their accuracy is not measured.'}"
            )
    few = [name for name, counts in report.classes.items() if 0 < counts.get("train", FEW) < FEW]
    if few:
        yield f"{len(few)} classes have fewer than {FEW} training images: {some(few)}. Add images, or merge classes."
    if "train" in held and "val" not in held:
        yield "There is no val split. Move a share of the training images there, to choose the best epoch on."


def balance_problems(report: DataReport) -> Iterator[str]:
    counts = {name: held["train"] for name, held in report.classes.items() if held.get("train")}
    if counts and max(counts.values()) > IMBALANCE * min(counts.values()):
        large, small = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
        yield (
            f"Training classes are very uneven: {large!r} has {counts[large]} images, {small!r} has {counts[small]}. "
            f"Add images of the small classes, and look at the accuracy of each class."
        )


def name_problems(names: Sequence[str]) -> Iterator[str]:
    alike: dict[str, list[str]] = defaultdict(list)
    for name in names:
        alike[name.strip().casefold()].append(name)
    for group in alike.values():
        if len(group) > 1:
            yield (
                f"The class names {' and '.join(map(repr, group))} differ only in case or spaces. "
                f"If they are one class, give them one name."
            )


def some(names: Sequence[str]) -> str:
    return ", ".join(names[:LISTED]) + (" ..." if len(names) > LISTED else "")
