"""Small datasets on disk, written in the published formats."""

import gzip
import io
import json
import pickle
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Array = np.ndarray[Any, Any]


def picture(number: int, size: tuple[int, int] = (12, 10)) -> Image.Image:
    """A different RGB image for every number."""
    pixels = np.random.RandomState(number).randint(0, 256, (size[1], size[0], 3)).astype(np.uint8)
    return Image.fromarray(pixels)


def packed(image: Image.Image, form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form)
    return buffer.getvalue()


def write(path: Path, image: Image.Image) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
    return path


def folder(root: Path, counts: Mapping[str, Mapping[str, int]]) -> Path:
    """{"train": {"cat": 3}} as ROOT/train/cat/*.png; all images differ."""
    number = 0
    for split, classes in counts.items():
        for name, count in classes.items():
            (root / split / name).mkdir(parents=True, exist_ok=True)
            for _ in range(count):
                write(root / split / name / f"{number}.png", picture(number))
                number += 1
    return root


def cifar_images(count: int, seed: int = 0) -> Array:
    return np.random.RandomState(seed).randint(0, 256, (count, 3072)).astype(np.uint8)


def cifar10_pickles(root: Path, count: int = 4) -> Path:
    """As Python 2 wrote them: protocol 2, byte strings as keys."""
    root.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate([*(f"data_batch_{batch}" for batch in range(1, 6)), "test_batch"]):
        batch = {b"data": cifar_images(count, number), b"labels": [(number + row) % 10 for row in range(count)]}
        (root / name).write_bytes(pickle.dumps(batch, protocol=2))
    return root


def idx(path: Path, array: Array) -> None:
    raw = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes() + array.tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


def shard(path: Path, samples: Sequence[tuple[str, Mapping[str, bytes]]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for key, files in samples:
            for extension, raw in files.items():
                entry = tarfile.TarInfo(f"{key}.{extension}")
                entry.size = len(raw)
                archive.addfile(entry, io.BytesIO(raw))
    return path


def shards(root: Path, count: int, each: int, prefix: str = "train") -> Path:
    for number in range(count):
        keys = range(number * each, (number + 1) * each)
        shard(
            root / f"{prefix}-{number:04d}.tar",
            [(f"{key:06d}", {"png": packed(picture(key)), "cls": str(key % 3).encode()}) for key in keys],
        )
    return root


def sheets(root: Path, count: int = 3) -> Path:
    """The npm package's layout."""
    root.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate([*(f"data_batch_{batch}" for batch in range(1, 6)), "test_batch"]):
        planes = cifar_images(count, number).reshape(count, 3, 1024)
        Image.fromarray(np.ascontiguousarray(planes.transpose(0, 2, 1))).save(root / f"{name}.png")
    (root / "train_lables.json").write_text(json.dumps([row % 10 for row in range(5 * count)]))
    (root / "test_lables.json").write_text(json.dumps([row % 10 for row in range(count)]))
    return root


def vtab(root: Path, tasks: Sequence[str], count: int = 4) -> Path:
    """Tasks of VTAB-1K as they are shared: TASK/images, and a list of `count` images of two classes per split."""
    for task in tasks:
        for seed, (split, name) in enumerate({"train": "train800", "val": "val200", "test": "test"}.items()):
            for index in range(count):
                write(root / task / "images" / split / f"{index}.png", picture(seed * count + index))
            lines = [f"images/{split}/{index}.png {index % 2}" for index in range(count)]
            (root / task / f"{name}.txt").write_text("\n".join(lines))
    return root
