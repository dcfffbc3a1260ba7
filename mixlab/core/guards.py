"""Faults of real machines that would otherwise end the process or slow it down.

A torchvision whose C++ operators do not load (built for another torch) dies at import, and timm with it.
A CPU that advertises AMX but traps on it kills bf16 arithmetic with SIGILL.
A C library that returns memory to the system after every layer makes the next layer fault it in again.
"""

import ctypes
import functools
import importlib.util
import os
import pathlib
import platform
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from mixlab.core.compat import differentiates_forwards, marked_constant, traces, transforms
from mixlab.core.errors import PrecisionError

ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
SAFE_ISA = "AVX512_CORE_BF16"
PROBE_SECONDS = 20.0
MEMORY_VARIABLE = "MIXLAB_KEEP_MEMORY"
MAP_FROM, TRIM_FROM = -3, -1  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of mallopt
LARGEST = 2**25  # bytes; glibc allows no more
Function = TypeVar("Function", bound=Callable[..., object])

_torchvision_schemas: torch.library.Library | None = None  # lives as long as the process


def mend_torchvision() -> bool:
    """Make `import torchvision` work where its C++ operators do not load; True if anything was done.

    torchvision describes its `nms` operators while it is imported, which fails when nobody has defined them.
    Definitions alone let the import pass; the operators themselves stay missing.
    """
    global _torchvision_schemas
    if _torchvision_schemas is not None or "torchvision" in sys.modules or torchvision_operators_load():
        return False
    for name in [name for name in sys.modules if name.startswith("torchvision.")]:
        del sys.modules[name]  # what an import that failed earlier left behind
    _torchvision_schemas = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        _torchvision_schemas.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return True


def torchvision_operators_load() -> bool:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True  # not installed: nothing to mend
    folder = pathlib.Path(spec.origin).parent
    binaries = [*folder.glob("_C.so"), *folder.glob("_C.pyd"), *folder.glob("_C.*.so")]
    try:
        for binary in binaries:
            torch.ops.load_library(binary)
    except (OSError, ImportError):
        return False
    return bool(binaries)


def keep_freed_memory() -> bool:
    """Let the C library keep what activations free for the next layer, instead of faulting it in page by page; True if
    it was told to.

    Left to itself, glibc returns every large tensor to the system and faults its successor in, 4 KB at a time: a tenth
    of a pass of many models. Here tensors of up to 32 MB come from a heap that shrinks only when the process ends or
    calls `return_freed_memory`. Tensors that grow from pass to pass may leave holes in it that none of the next fits
    into. `MIXLAB_KEEP_MEMORY=0` leaves everything as it was, and so do variables that set up glibc's allocator or
    preload another.
    """
    if not is_allocator_untouched():
        return False
    library = ctypes.CDLL(None)
    return bool(library.mallopt(MAP_FROM, LARGEST) and library.mallopt(TRIM_FROM, -1))  # never


def is_allocator_untouched() -> bool:
    """Whether memory comes from glibc, and nobody has set it up: by variables or by preloading another allocator."""
    is_glibc = sys.platform == "linux" and platform.libc_ver()[0] == "glibc"
    is_set = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    is_other = "malloc" in os.environ.get("LD_PRELOAD", "")
    return is_glibc and not is_set and not is_other and os.environ.get(MEMORY_VARIABLE, "1") != "0"


def return_freed_memory() -> None:
    """Give back to the system what was kept, for a process that goes on with something else."""
    if is_allocator_untouched():
        ctypes.CDLL(None).malloc_trim(0)


def check_bf16() -> None:
    """Before the first bf16 arithmetic on a CPU: make it safe, or raise. Costs milliseconds, once."""
    problem = _bf16_problem()
    if problem:
        raise PrecisionError(problem)


@functools.cache
def _bf16_problem() -> str:
    """Why bf16 cannot be used in this process; empty where it can.

    A forked child tries a product in this process's own state. If it dies, oneDNN is told to stay below AMX, which it
    obeys only if it has not been used yet; a second child tells whether it did.
    """
    if not advertises_amx() or _survives_bf16():
        return ""
    before = os.environ.get(ISA_VARIABLE)
    os.environ[ISA_VARIABLE] = SAFE_ISA
    if _survives_bf16():
        warnings.warn(
            f"bf16 arithmetic traps on this CPU with the instructions it advertises; {ISA_VARIABLE}={SAFE_ISA} "
            f"was set for this process. Set it in the environment to silence this warning.",
            stacklevel=4,
        )
        return ""
    if before is None:
        del os.environ[ISA_VARIABLE]
    else:
        os.environ[ISA_VARIABLE] = before
    return (
        f"bf16 arithmetic ends the process on this CPU (it advertises AMX but traps), and it is too late to avoid that "
        f"here: other arithmetic ran first. Start Python with {ISA_VARIABLE}={SAFE_ISA} in the environment, call "
        f"mixlab.core.guards.check_bf16() before anything else, or use float32."
    )


def advertises_amx() -> bool:
    try:
        return " amx_bf16" in pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _survives_bf16() -> bool:
    """Whether a small bf16 product leaves a copy of this process alive."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads: the child uses none
        child = os.fork()
    if child == 0:
        import resource  # not on every system; there is no fork there either

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        torch.set_num_threads(1)
        square = torch.ones(64, 64, dtype=torch.bfloat16)
        torch.mm(square, square)
        os._exit(0)
    deadline = time.monotonic() + PROBE_SECONDS
    while time.monotonic() < deadline:
        finished, status = os.waitpid(child, os.WNOHANG)
        if finished:
            return status == 0
        time.sleep(0.002)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


def is_constant(function: Function) -> Function:
    """Tells the compiler to call a function once and keep the answer."""
    return marked_constant(function)


@is_constant
def check_cpu_dtype(dtype: torch.dtype) -> bool:
    """Raise if a CPU cannot compute in this dtype. True otherwise: a compiler keeps the answer as a constant."""
    if dtype is torch.bfloat16:
        check_bf16()
    return True


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Full precision inside, whatever autocast says outside. A tensor without data has no device to say it of.

    A graph that is exported would keep the context as a graph of its own, so there is none where autocast is off.
    """
    if tensor.is_meta or (is_exported() and not torch.is_autocast_enabled(tensor.device.type)):
        return nullcontext()
    return torch.autocast(tensor.device.type, enabled=False)


def is_transformed() -> bool:
    """Whether something other than plain autograd follows the arithmetic: a compiler, a tracer, vmap, forward mode."""
    return torch.compiler.is_compiling() or traces() or differentiates_forwards() or transforms()


def is_exported() -> bool:
    """Whether the arithmetic is being written down as a graph for other programs, not compiled for this one."""
    asked = getattr(torch.compiler, "is_exporting", None)  # older releases of torch do not say
    return asked is not None and bool(asked())


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """What autocast would compute in on this tensor's device; None where it is off."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None


def check_precision(tensor: torch.Tensor) -> None:
    """Raise if arithmetic on this tensor, in the dtype that autocast may choose, would end the process."""
    if tensor.device.type == "cpu":
        check_cpu_dtype(autocast_dtype(tensor) or tensor.dtype)
