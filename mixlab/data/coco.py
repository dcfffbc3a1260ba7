"""Datasets in COCO's format: one JSON file of objects per split beside folders of images.

ROOT/annotations/instances_train2017.json with ROOT/train2017/, or ROOT/train.json with ROOT/train/ or ROOT/images/;
val and test likewise. Images without objects belong to the dataset.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import ExifTags, Image

from mixlab.core.errors import DataError, UnreadableImage
from mixlab.data.coco_listing import Listing, positive, read_listing, some
from mixlab.data.dense import Annotated, ObjectData, Objects
from mixlab.data.folder import SPLIT_NAMES
from mixlab.data.images import UPRIGHT, decode
from mixlab.data.kinds import Array
from mixlab.data.outlines import is_sound, mask_api, rasterise

YEARS = ("2017", "2014", "")
EXPECTED = (
    "Expected ROOT/annotations/instances_train2017.json with ROOT/train2017/, or ROOT/train.json with images in "
    "ROOT/train/ or ROOT/images/ (val and test likewise)."
)
PROBED = 20  # files that are looked for in a folder before it is taken for the wrong one
SLACK = 1.0  # px that a box may reach over the border without a word; rounding does it
AS_STORED = UPRIGHT | {6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}  # what undoes `UPRIGHT`


class CocoObjects(ObjectData):
    """One split. Category ids become classes 0, 1, ... in ascending order of the ids.

    Boxes are clipped to the image, and objects without any box in it are left out (`object_problems` counts them).
    Boxes refer to pixels as they are stored, so EXIF orientation is ignored; only where the size in the file of
    annotations fits the image turned upright and not the stored one, it is turned. If any object has an outline all
    have masks: the box is the mask where the outline is missing or broken.
    """

    def __init__(self, listing: Listing, folder: Path) -> None:
        self.listing, self.folder = listing, str(folder)
        self.class_names = listing.class_names
        self.has_masks = bool(listing.outlines.given().any())

    def __len__(self) -> int:
        return len(self.listing.files)

    def name(self, index: int) -> str:
        return os.path.join(self.folder, self.listing.files[index])  # a file name may be a whole path

    def read(self, index: int) -> Annotated:
        listing = self.listing
        width, height = (int(side) for side in listing.sizes[index])
        image = read_image(Path(self.name(index)), (width, height) if width else None)
        own = np.arange(listing.starts[index], listing.starts[index + 1])
        boxes = clip(listing.boxes[own], image.size)
        kept = positive(boxes)
        own, boxes = own[kept], boxes[kept]
        masks = self.masks(own, boxes, image.size) if self.has_masks else None
        measured = extent(boxes) if masks is None else masks.sum((1, 2)).astype(np.float32)
        area = np.where(np.isnan(listing.area[own]), measured, listing.area[own])
        objects = Objects(
            boxes=torch.from_numpy(boxes),
            labels=torch.from_numpy(listing.labels[own]),
            masks=None if masks is None else torch.from_numpy(masks),
            crowd=torch.from_numpy(listing.crowd[own]),
            area=torch.from_numpy(area),
        )
        return Annotated(image, objects)

    def masks(self, own: Array, boxes: Array, size: tuple[int, int]) -> Array:
        """(N, H, W) bool."""
        width, height = size
        masks = np.zeros((len(own), height, width), dtype=np.bool_)
        for mask, number, box in zip(masks, own, boxes, strict=True):
            drawn = rasterise(self.listing.outlines[number], height, width)
            if drawn is None:
                left, top, right, bottom = box
                mask[int(top) : int(np.ceil(bottom)), int(left) : int(np.ceil(right))] = True
            else:
                mask[:] = drawn
        return masks


def is_coco(path: Path) -> bool:
    """By the names of files; whether they hold what they should shows when a split is opened."""
    return bool(annotation_files(path))


def coco_splits(path: Path) -> list[str]:
    return list(annotation_files(path))


def open_coco(path: Path, split: str) -> CocoObjects:
    found = annotation_files(path)
    if split not in found:
        raise DataError(
            f"{path} has no {split} split in COCO's format; it has: {', '.join(found) or 'none'}. {EXPECTED}"
        )
    file = found[split]
    listing = read_listing(file)
    if listing.outlines.given().any():
        mask_api()  # a missing package is better told now than by the first batch
    return CocoObjects(listing, image_folder(path, file.stem.removeprefix("instances_"), listing))


# -- files ---------------------------------------------------------------------------------------


def annotation_files(root: Path) -> dict[str, Path]:
    """The file of each split that there is."""
    found: dict[str, Path] = {}
    for split, names in SPLIT_NAMES.items():
        files = [root / "annotations" / f"instances_{name}{year}.json" for year in YEARS for name in names]
        files += [root / f"{name}.json" for name in names]
        present = [file for file in files if file.is_file()]
        if present:
            found[split] = present[0]
    return found


def image_folder(root: Path, stem: str, listing: Listing) -> Path:
    folders = (root / stem, root / "images" / stem, root / "images", root)
    for folder in folders:
        if any((folder / file).is_file() for file in listing.files[:PROBED]):
            return folder
    raise DataError(
        f"The images of {listing.path} were not found: no {listing.files[0]} in {', '.join(map(str, folders))}. "
        f"{EXPECTED}"
    )


def read_image(path: Path, size: tuple[int, int] | None) -> Image.Image:
    """The image that the annotations describe, `size` being the (width, height) that they say."""
    image = decode(path)
    stored = turned_back(image, path)
    fits = size is not None and image.size == size != stored.size  # annotated on the upright image
    image = image if fits else stored
    if size is not None and image.size != size:
        raise UnreadableImage(
            f"{path} has {image.width} x {image.height} pixels, but its annotations are for {size[0]} x {size[1]}. "
            f"Put the original image back, or correct the annotations."
        )
    return image


def turned_back(image: Image.Image, path: Path) -> Image.Image:
    """A decoded image as its file stores it; decoding turns images upright."""
    try:
        with Image.open(path) as file:
            orientation = file.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # a broken EXIF block, for which decoding turned nothing either
        return image
    return image.transpose(AS_STORED[orientation]) if orientation in AS_STORED else image


def clip(boxes: Array, size: tuple[int, int]) -> Array:
    """Boxes within an image of (width, height)."""
    return boxes.clip(0, np.array([*size, *size], dtype=np.float32))


def extent(boxes: Array) -> Array:
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


# -- problems ------------------------------------------------------------------------------------


def object_problems(data: CocoObjects) -> Iterator[str]:
    """What is wrong with the annotations, and images that are missing; no image is read."""
    listing = data.listing
    yield from file_problems(data)
    yield from box_problems(data)
    yield from outline_problems(data)
    if listing.strays:
        yield f"{listing.strays} objects of {listing.path} are of images that it does not list. They are left out."
    if listing.repeated:
        yield f"{listing.repeated} objects of {listing.path} have the id of another one. Is one of them there twice?"
    counts = np.bincount(listing.labels, minlength=len(listing.class_names))
    absent = [name for name, count in zip(listing.class_names, counts, strict=True) if not count]
    if absent:
        yield f"{len(absent)} classes of {listing.path} have no objects: {some(absent)}."
    if len(set(listing.class_names)) < len(listing.class_names):
        yield f"{listing.path} has categories of the same name. If they are one class, give them one id."


def file_problems(data: CocoObjects) -> Iterator[str]:
    listing = data.listing
    missing = [file for index, file in enumerate(listing.files) if not os.path.isfile(data.name(index))]
    if missing:
        yield (
            f"{len(missing)} of the {len(data)} images of {listing.path} are not in {data.folder}: {some(missing)}. "
            f"Put them there or remove their entries; training skips them."
        )
    empty = np.flatnonzero(np.diff(listing.starts) == 0)
    if len(empty):
        names = some([listing.files[index] for index in empty])
        yield f"{len(empty)} images of {listing.path} have no objects: {names}. They train as negatives."


def box_problems(data: CocoObjects) -> Iterator[str]:
    listing = data.listing
    sized = positive(listing.boxes)
    limits = np.repeat(listing.sizes, np.diff(listing.starts), axis=0)[:, [0, 1, 0, 1]].astype(np.float32)
    limits[limits == 0] = np.inf  # of unknown size
    clipped = listing.boxes.clip(0, limits)
    outside = sized & ~positive(clipped)
    across = sized & ~outside & (np.abs(clipped - listing.boxes) > SLACK).any(1)
    for found, what, result in (
        (~sized, "no box with a width and a height above 0", "They are left out"),
        (outside, "a box outside their image", "They are left out"),
        (across, f"a box that reaches more than {SLACK:g} px over the border", "It is cut there"),
    ):
        if found.any():
            yield f"{found.sum()} objects of {listing.path} have {what}: {where(listing, found)}. {result}."


def outline_problems(data: CocoObjects) -> Iterator[str]:
    if not data.has_masks:
        return
    listing, broken = data.listing, np.zeros(len(data.listing.labels), dtype=np.bool_)
    for index, (width, height) in enumerate(listing.sizes.tolist()):
        for number in range(listing.starts[index], listing.starts[index + 1]) if width else ():
            broken[number] = not is_sound(listing.outlines[number], height, width)
    if broken.any():
        yield (
            f"{broken.sum()} objects of {listing.path} have no outline, or one that does not fit their image: "
            f"{where(listing, broken)}. Their box is taken for their mask."
        )


def where(listing: Listing, objects: Array) -> str:
    """The images of some objects, (N,) bool."""
    images = np.searchsorted(listing.starts, np.flatnonzero(objects), side="right") - 1
    return some([listing.files[index] for index in dict.fromkeys(images.tolist())])
