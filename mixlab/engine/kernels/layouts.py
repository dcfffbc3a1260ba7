"""What the library says of itself: the structs that kernels take, activations and constants, as C has them.

There is one definition, `layouts.h`. The library describes it line by line; here the description becomes classes.
"""

import ctypes
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from mixlab.core.errors import MixlabError

FINGERPRINT = 1671500484  # of the description that this package's Python was written for: `fingerprint_of`
SCALARS = {"int": ctypes.c_int, "long": ctypes.c_long, "ptrdiff_t": ctypes.c_ssize_t, "float": ctypes.c_float}
ARRAYS = {"int_3": ctypes.c_int * 3, "float_2": ctypes.c_float * 2}
REPEATED = {"lstm_4": ("lstm", 4)}  # structs several times
POINTERS = ("floats_in", "floats_out", "doubles_out", "ints_in")
KINDS: dict[str, Any] = {**SCALARS, **ARRAYS, **dict.fromkeys(POINTERS, ctypes.c_void_p)}
NESTED = "struct_"  # in front of the name of a struct that is a field


class LayoutError(MixlabError):
    """The library's structs are not what this package's Python takes them for."""


class Layouts(NamedTuple):
    """What both sides have to agree on."""

    structs: dict[str, type[ctypes.Structure]]
    taken: dict[str, str]  # of every kernel the struct that it takes, in the order of the kernels' numbers
    activations: dict[str, int]
    constants: dict[str, int]


def fingerprint_of(description: str) -> int:
    return zlib.crc32(description.encode())


def read_layouts(description: str) -> Layouts:
    """Read the lines that the library writes; raises `LayoutError` where ctypes would lay out a struct otherwise."""
    structs: dict[str, type[ctypes.Structure]] = {}
    taken: dict[str, str] = {}
    numbers: dict[str, dict[str, int]] = {"activation": {}, "constant": {}}
    lines = [line.split() for line in description.splitlines()]
    for line in lines:
        if line[0] in numbers:
            numbers[line[0]][line[1]] = int(line[2])
        elif line[0] == "kernel":
            taken[line[1]] = line[2]
    for name, size, fields in struct_lines(lines):
        structs[name] = make_struct(name, size, fields, structs)
    return Layouts(structs, taken, numbers["activation"], numbers["constant"])


def struct_lines(lines: list[list[str]]) -> Iterator[tuple[str, int, list[list[str]]]]:
    """Name, size and lines of fields of every struct."""
    starts = [index for index, line in enumerate(lines) if line[0] == "struct"]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield lines[start][1], int(lines[start][2]), lines[start + 1 : end]


def field_type(kind: str, structs: dict[str, type[ctypes.Structure]]) -> Any:
    """The type of a field of such a kind; None if there is none."""
    if kind in REPEATED:
        name, count = REPEATED[kind]
        return structs[name] * count
    return structs.get(kind.removeprefix(NESTED)) if kind.startswith(NESTED) else KINDS.get(kind)


def make_struct(
    name: str, size: int, fields: list[list[str]], structs: dict[str, type[ctypes.Structure]]
) -> type[ctypes.Structure]:
    """A class of the fields that the library names, each at the offset that it tells."""
    types = []
    for _, field, kind, _, _ in fields:
        known = field_type(kind, structs)
        if known is None:
            raise LayoutError(f"The field {field} of the struct {name} is of a kind that Python does not know: {kind}.")
        types.append((field, known))
    made = type(name, (ctypes.Structure,), {"_fields_": types})
    for _, field, _, offset, width in fields:
        place = getattr(made, field)
        if (place.offset, place.size) != (int(offset), int(width)):
            raise LayoutError(
                f"The field {field} of the struct {name} lies at {offset} with {width} bytes in the library, "
                f"and at {place.offset} with {place.size} bytes in Python."
            )
    if ctypes.sizeof(made) != size:
        raise LayoutError(f"The struct {name} has {size} bytes in the library and {ctypes.sizeof(made)} in Python.")
    return made
