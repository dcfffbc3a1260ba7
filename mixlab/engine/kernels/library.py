"""The compiled library: where it lies, whether it belongs to this package, and if not, why not."""

import ctypes
import functools
import importlib.util
import os
import pathlib
import sys
import warnings
from typing import NamedTuple

import torch

from mixlab.core.errors import MixlabError
from mixlab.engine.kernels.layouts import FINGERPRINT, LayoutError, fingerprint_of, read_layouts
from mixlab.engine.kernels.processors import allowed_processors

VARIABLE = "MIXLAB_NATIVE"  # 0: none; 4, 8 or 16: vectors of so many numbers at most
MODULE = "mixlab.engine.kernels._kernels"
WIDEST = 16
FUNCTIONS = ("steps", "same", "unchanged", "choose", "limit_threads", "use_team", "count_workers")
AGAIN = "Install Mixlab again to build it anew."


class LibraryError(MixlabError):
    """A library that is there but cannot serve; the message says why."""


class Kernels:
    """The library, ready to be called with pointers."""

    def __init__(self, path: str, most_lanes: int) -> None:
        try:
            self.library = ctypes.CDLL(path)
        except OSError as error:  # built for another machine, damaged, or without what it needs
            raise LibraryError(f"{path} does not load: {error}.") from error
        description = self.describe(path)
        if fingerprint_of(description) != FINGERPRINT:
            raise LibraryError(f"{path} was built from older sources or from newer ones. {AGAIN}")
        try:
            self.layouts = read_layouts(description)
        except LayoutError as error:
            raise LibraryError(f"{path} is of another build. {error} {AGAIN}") from error
        self.check_symbols(path)
        self.library.mixlab_limit_threads(allowed_processors())
        self.library.mixlab_use_team(team_starter())
        self.lanes = int(self.library.mixlab_choose(most_lanes))
        unchanged = ctypes.PyDLL(path).mixlab_unchanged  # with the interpreter's lock
        unchanged.argtypes = [ctypes.py_object] * 4
        self.unchanged = unchanged
        self.compare, self.steps = self.library.mixlab_same, self.library.mixlab_steps

    def describe(self, path: str) -> str:
        """What the library says of its structs, activations and constants."""
        if not hasattr(self.library, "mixlab_describe"):
            raise LibraryError(f"{path} was built from older sources: it does not describe itself. {AGAIN}")
        describe = self.library.mixlab_describe
        describe.restype, describe.argtypes = ctypes.c_size_t, (ctypes.c_char_p, ctypes.c_size_t)
        room = ctypes.create_string_buffer(describe(None, 0) + 1)
        describe(room, len(room))
        return room.value.decode()

    def check_symbols(self, path: str) -> None:
        names = (*self.layouts.taken, *FUNCTIONS)
        missing = [name for name in names if not hasattr(self.library, f"mixlab_{name}")]
        if missing:
            raise LibraryError(f"{path} lacks the functions {', '.join(missing)}. {AGAIN}")

    def are_same(self, now: object, before: object, sizes: object, count: int) -> bool:
        """Whether pieces of memory of so many bytes hold the same: arrays of their addresses and sizes."""
        return bool(self.compare(now, before, sizes, count, torch.get_num_threads()))

    def run(self, name: str, about: ctypes.Structure) -> None:
        if getattr(self.library, f"mixlab_{name}")(ctypes.byref(about), ctypes.sizeof(about)):
            raise failure(name)

    def run_steps(self, text: bytearray, *, is_whole: bool = False) -> None:
        """Run kernels that are written down one after the other, each behind its number and the size of its struct.

        `is_whole`: they are a whole model, and PyTorch does nothing between two such calls. Then they run on the pool
        of the library's own, which never waits for a thread that the system has not scheduled; its threads and those
        of PyTorch's operators would hinder each other.
        """
        size = len(text)
        if self.steps((ctypes.c_char * size).from_buffer(text), ctypes.c_size_t(size), int(is_whole)):
            raise failure("steps")


def team_starter() -> object:
    """The function of PyTorch's own OpenMP library that starts a team of threads; None where PyTorch has another."""
    try:
        return ctypes.CDLL(str(pathlib.Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None


def failure(name: str) -> RuntimeError:
    return RuntimeError(
        f"The kernel {name} found no memory for what it needs beside its input and output. "
        f"{VARIABLE}=0 in the environment leaves its work to PyTorch."
    )


class Loaded(NamedTuple):
    """The kernels, or the reason why there are none and whether somebody would expect them."""

    kernels: Kernels | None
    reason: str | None = None
    is_unexpected: bool = False


def load() -> Loaded:
    """Look for the library and load it; whatever goes wrong is told in words."""
    wanted = os.environ.get(VARIABLE, str(WIDEST))
    if not wanted.isdecimal():
        return Loaded(None, f"{VARIABLE}={wanted} in the environment is none of 0, 4, 8 and 16.", is_unexpected=True)
    if int(wanted) == 0:
        return Loaded(None, f"{VARIABLE}=0 in the environment switches them off.")
    if sys.platform != "linux":
        return Loaded(None, f"They are made for Linux, and this is {sys.platform}: PyTorch does their work.")
    try:
        spec = importlib.util.find_spec(MODULE)
        if spec is None or spec.origin is None:
            return without_library()
        return Loaded(Kernels(spec.origin, int(wanted)))
    except LibraryError as error:
        return Loaded(None, str(error), is_unexpected=True)


def without_library() -> Loaded:
    """None for this Python; perhaps one for another."""
    others = sorted(path.name for path in pathlib.Path(__file__).parent.glob("_kernels.*.so"))
    if others:
        return Loaded(None, f"{', '.join(others)} was built for another Python. {AGAIN}", is_unexpected=True)
    return Loaded(None, f"They were not built: there was no C compiler (gcc) when Mixlab was installed. {AGAIN}")


@functools.cache
def loaded() -> Loaded:
    """The library as it was when it was asked for first; a warning if it should have been there."""
    found = load()
    if found.is_unexpected:
        warnings.warn(
            f"Mixlab runs without its kernels, two to four times slower. {found.reason} "
            f"Set {VARIABLE}=0 to do without them quietly.",
            stacklevel=2,
        )
    return found


@functools.cache
def kernels() -> Kernels | None:
    """The kernels, or None where there are none."""
    return loaded().kernels


def reason_without_kernels() -> str | None:
    """Why there are no kernels, in a sentence; None where there are."""
    return loaded().reason


def structure(name: str) -> type[ctypes.Structure]:
    """The struct of that name as the library lays it out; without kernels a class of which nothing can be made."""
    found = kernels()
    return ctypes.Structure if found is None else found.layouts.structs[name]


def constant(name: str) -> int:
    """A number that the library is built with; 0 without kernels, where nobody needs it."""
    found = kernels()
    return 0 if found is None else found.layouts.constants[name]


def kernel_number(name: str) -> int:
    """The library's number for a kernel among steps."""
    found = kernels()
    assert found is not None
    return list(found.layouts.taken).index(name)


def activation_number(name: str) -> int:
    """The library's number for what follows a product."""
    found = kernels()
    assert found is not None
    return found.layouts.activations[name]
