"""Pickles of plain values and uint8 arrays, read without running anything that is in them.

The unpickler knows no class but the stand-ins below, which only note what numpy would have been told.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from mixlab.core.errors import DataError
from mixlab.data.kinds import Array

BYTE_TYPES = ("u1", "|u1", "uint8")


class NotedType:
    """Stands for `numpy.dtype`."""

    def __init__(self, name: str | bytes, *_: object) -> None:
        self.name = name.decode("ascii") if isinstance(name, bytes) else name

    def __setstate__(self, state: object) -> None:
        pass  # byte order and the like mean nothing for single bytes


class NotedArray:
    """Stands for `numpy.ndarray`: shape, type and bytes."""

    def __init__(self, *_: object) -> None:
        self.shape: tuple[int, ...] = ()
        self.type: object = None
        self.fortran = False
        self.raw: object = b""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, self.type, self.fortran, self.raw = state

    def array(self) -> Array:
        if not isinstance(self.type, NotedType) or self.type.name not in BYTE_TYPES or not isinstance(self.raw, bytes):
            raise pickle.UnpicklingError("an array that is not of bytes")
        return np.frombuffer(self.raw, np.uint8).reshape(self.shape, order="F" if self.fortran else "C")


def reconstruct(*_: object) -> NotedArray:
    return NotedArray()


def latin1(text: str, encoding: str) -> bytes:
    """How old protocols write bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in the encoding {encoding!r}")
    return text.encode("latin1")


ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): reconstruct,
    ("numpy", "ndarray"): NotedArray,
    ("numpy", "dtype"): NotedType,
    ("_codecs", "encode"): latin1,
}


class ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no file of this kind needs")
        return ALLOWED[module, name]


def read_arrays(path: Path) -> dict[str, Any]:
    """The dictionary in a pickle, with text keys and real arrays."""
    try:
        with path.open("rb") as file:
            found = ArrayUnpickler(file, encoding="bytes").load()
        return {text(key): value.array() if isinstance(value, NotedArray) else value for key, value in found.items()}
    except Exception as error:  # a broken pickle raises nearly anything
        raise DataError(f"{path} was not read: {error}. Get the file again from its publisher.") from error


def text(key: str | bytes) -> str:
    return key.decode("utf-8") if isinstance(key, bytes) else key
