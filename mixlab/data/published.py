"""MNIST, Fashion-MNIST, Flowers-102 and Stanford Cars, as their authors published them."""

import gzip
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from mixlab.core.errors import DataError
from mixlab.data.kinds import Array, ArrayData, FileData, needed

FASHION = ("t-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
IDX_NAMES: dict[str, tuple[str, ...]] = {"mnist": tuple(str(digit) for digit in range(10)), "fashion_mnist": FASHION}
IDX_FOLDERS = ("", "raw", "MNIST/raw", "FashionMNIST/raw")
IDX_PREFIX = {"train": "train", "test": "t10k"}
IDX_BYTES = 0x08  # the type code of unsigned bytes

FLOWER_SETS = {"train": "trnid", "val": "valid", "test": "tstid"}
FLOWERS = 102

CARS_TRAIN = ("devkit/cars_train_annos.mat", "cars_train_annos.mat")
CARS_TEST = ("devkit/cars_test_annos_withlabels.mat", "cars_test_annos_withlabels.mat")
CARS_META = ("devkit/cars_meta.mat", "cars_meta.mat")
CARS_ALL = ("cars_annos.mat", "devkit/cars_annos.mat")  # the single file of the first release

Mat = dict[str, Any]


# -- MNIST and Fashion-MNIST ---------------------------------------------------------------------


def idx_splits(name: str, root: Path) -> list[str]:
    return [split for split in IDX_PREFIX if find_idx(root, split, "images") and find_idx(root, split, "labels")]


def open_idx(name: str, root: Path, split: str) -> ArrayData:
    images, labels = find_idx(root, split, "images"), find_idx(root, split, "labels")
    if images is None or labels is None:
        raise DataError(f"No {split} files of {name} in {root}. {IDX_EXPECTED}")
    pixels = read_idx(images)
    if pixels.ndim != 3:
        raise DataError(f"{images} holds an array of shape {pixels.shape}; expected images, (N, height, width).")
    return ArrayData(pixels, read_idx(labels), IDX_NAMES[name], origin=f"{name}/{split}")


IDX_EXPECTED = "Expected train-images-idx3-ubyte, train-labels-idx1-ubyte and the two of t10k, packed (.gz) or not."


def find_idx(root: Path, split: str, what: str) -> Path | None:
    dimensions = 3 if what == "images" else 1
    for separator in "-.":
        stem = f"{IDX_PREFIX[split]}-{what}{separator}idx{dimensions}-ubyte"
        paths = [root / folder / (stem + suffix) for folder in IDX_FOLDERS for suffix in ("", ".gz")]
        for path in paths:
            if path.is_file():
                return path
    return None


def read_idx(path: Path) -> Array:
    """Two zero bytes, type, number of dimensions, the dimensions as big-endian words, the values."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked: {error}. Get the file again from its publisher.") from error
    if len(raw) < 4 or raw[:3] != bytes((0, 0, IDX_BYTES)):
        raise DataError(f"{path} does not begin as an idx file of bytes. Get the file again from its publisher.")
    start = 4 + 4 * raw[3]
    shape = tuple(int(size) for size in np.frombuffer(raw[4:start], ">u4"))
    if len(shape) != raw[3] or len(raw) - start != np.prod(shape):
        raise DataError(f"{path} has {len(raw) - start} values; its header says {shape}. Get the file again.")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


# -- Flowers-102 ---------------------------------------------------------------------------------


def flowers_splits(root: Path) -> list[str]:
    return list(FLOWER_SETS) if (root / "setid.mat").is_file() and (root / "imagelabels.mat").is_file() else []


def open_flowers(root: Path, split: str) -> FileData:
    """The publisher's sets. Class names are the published numbers, 1 to 102; no names come with the files."""
    numbers = np.ravel(entry(root / "setid.mat", FLOWER_SETS[split])).astype(int)  # from 1
    labels = np.ravel(entry(root / "imagelabels.mat", "labels")).astype(int)  # from 1
    if numbers.min() < 1 or numbers.max() > len(labels):
        raise DataError(
            f"{root}/setid.mat names image {numbers.max()} of {len(labels)}. The files do not fit together."
        )
    paths = [root / "jpg" / f"image_{number:05d}.jpg" for number in numbers]
    return FileData(paths, labels[numbers - 1] - 1, [str(number) for number in range(1, FLOWERS + 1)])


FLOWERS_EXPECTED = "Expected jpg/image_00001.jpg ..., imagelabels.mat and setid.mat."


# -- Stanford Cars -------------------------------------------------------------------------------


def cars_splits(root: Path) -> list[str]:
    if first_of(root, CARS_ALL):
        return ["train", "test"]
    if first_of(root, CARS_META) is None:
        return []
    places = {"train": CARS_TRAIN, "test": CARS_TEST}
    return [split for split, names in places.items() if first_of(root, names)]


def open_cars(root: Path, split: str) -> FileData:
    everything = first_of(root, CARS_ALL)
    meta = everything or first_of(root, CARS_META)
    annotations = everything or first_of(root, CARS_TRAIN if split == "train" else CARS_TEST)
    if meta is None or annotations is None:
        raise DataError(f"No {split} annotations of Stanford Cars in {root}. {CARS_EXPECTED}")
    names = [str(name) for name in np.atleast_1d(entry(meta, "class_names"))]
    rows = np.atleast_1d(entry(annotations, "annotations"))
    try:
        paths, labels = read_cars(rows, root, split, whole=everything is not None)
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError(
            f"{annotations} has no class for its images ({error}). "
            f"For the test images, get cars_test_annos_withlabels.mat."
        ) from error
    return FileData(paths, labels, names)


CARS_EXPECTED = (
    "Expected cars_train/, cars_test/, devkit/cars_meta.mat, devkit/cars_train_annos.mat and "
    "cars_test_annos_withlabels.mat; or car_ims/ and cars_annos.mat."
)


def read_cars(rows: Iterable[Any], root: Path, split: str, *, whole: bool) -> tuple[list[Path], list[int]]:
    if whole:
        rows = [row for row in rows if int(row.test) == (split == "test")]
        paths = [root / str(row.relative_im_path) for row in rows]
    else:
        rows = list(rows)
        paths = [root / f"cars_{split}" / str(row.fname) for row in rows]
    return paths, [int(getattr(row, "class")) - 1 for row in rows]


# -- .mat files ----------------------------------------------------------------------------------


def first_of(root: Path, names: Iterable[str]) -> Path | None:
    return next((root / name for name in names if (root / name).is_file()), None)


def entry(path: Path, key: str) -> Any:
    try:
        found: Mat = needed("scipy.io").loadmat(path, squeeze_me=True, struct_as_record=False)
    except DataError:
        raise
    except Exception as error:  # a broken file raises nearly anything
        raise DataError(f"{path} is not a readable MATLAB file: {error}. Get it again from its publisher.") from error
    if key not in found:
        names = sorted(name for name in found if not name.startswith("__"))
        raise DataError(f"{path} holds {names}; expected {key!r}. Is it a file of this dataset?")
    return found[key]
