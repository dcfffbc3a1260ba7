"""What this machine and this installation offer, what is missing, and what makes the program slow or wrong."""

import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from mixlab.core import guards
from mixlab.core.errors import PrecisionError
from mixlab.core.installed import packages, version_of
from mixlab.core.processor import instruction_sets, memory_bytes, processor_name, usable_processors
from mixlab.core.version import VERSION
from mixlab.engine.compile import COMPILERS, has_compiler
from mixlab.engine.kernels import VARIABLE, kernels, reason_without_kernels
from mixlab.engine.kernels.processors import NO_LIMIT, allowed_processors

Severity = Literal["wrong", "slow", "missing"]
VECTORS = {4: "SSE, NEON or the like", 8: "AVX2", 16: "AVX-512"}
FOR_TOOLS = ("dev", "docs", "all")  # extras for working on Mixlab, not with it
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED = 2**28  # bytes that a few workers fill with batches
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Fact:
    """One line of the report."""

    name: str
    value: str


@dataclass(frozen=True)
class Shortcoming:
    """What is not as it could be. `wrong` and `slow` are faults; what is `missing` is an option that was not taken."""

    severity: Severity
    what: str
    advice: str


@dataclass(frozen=True)
class Checkup:
    """All facts by section, and all problems."""

    sections: dict[str, dict[str, str]]
    problems: tuple[Shortcoming, ...]

    @property
    def is_healthy(self) -> bool:
        return all(problem.severity == "missing" for problem in self.problems)

    def plain(self) -> dict[str, Any]:
        """The checkup for JSON."""
        problems = [asdict(problem) for problem in self.problems]
        return {"healthy": self.is_healthy, "sections": self.sections, "problems": problems}


Line = Fact | Shortcoming


def examine() -> Checkup:
    """Look at everything that decides whether Mixlab runs right and fast here. It takes about a second."""
    sections: dict[str, dict[str, str]] = {}
    problems: list[Shortcoming] = []
    for title, examine_section in SECTIONS.items():
        lines = list(examine_section())
        sections[title] = {line.name: line.value for line in lines if isinstance(line, Fact)}
        problems += [line for line in lines if isinstance(line, Shortcoming)]
    order: tuple[Severity, ...] = ("wrong", "slow", "missing")
    return Checkup(sections, tuple(sorted(problems, key=lambda problem: order.index(problem.severity))))


def examine_machine() -> Iterator[Line]:
    yield Fact("system", f"{platform.system()} {platform.release()} {platform.machine()}")
    yield Fact("processor", processor_name())
    yield Fact("instruction sets", " ".join(instruction_sets()) or torch.backends.cpu.get_cpu_capability())
    memory = memory_bytes()
    if memory is not None:
        yield Fact("memory", f"{memory / 2**30:.1f} GiB")
    yield Fact("freed memory", "kept for the next layer" if guards.is_allocator_untouched() else "as the system has it")
    if SHARED_MEMORY.is_dir():
        shared = shutil.disk_usage(SHARED_MEMORY).total
        yield Fact("shared memory", f"{shared / 2**30:.2g} GiB")
        if shared < LEAST_SHARED:
            advice = "Give the container more (docker run --shm-size=1g), or load data with --workers 0."
            yield Shortcoming("wrong", "Workers that load data run out of shared memory.", advice)


def examine_bf16() -> Iterator[Line]:
    """First of all: a processor that traps can only be told to be careful before other arithmetic."""
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        try:
            guards.check_bf16()
        except PrecisionError as error:
            yield Fact("bf16", "ends the process")
            yield Shortcoming("wrong", "bf16 arithmetic ends the process.", str(error))
            return
    mended = any(guards.ISA_VARIABLE in str(warning.message) for warning in raised)
    if mended or (guards.advertises_amx() and os.environ.get(guards.ISA_VARIABLE) == guards.SAFE_ISA):
        yield Fact("bf16", "works without AMX, on which this processor traps")
    else:
        yield Fact("bf16", "works with AMX" if guards.advertises_amx() else "works")
    if mended:
        advice = f"Set {guards.ISA_VARIABLE}={guards.SAFE_ISA} in the environment."
        yield Shortcoming("wrong", "This processor advertises AMX and traps on it.", advice)


def examine_versions() -> Iterator[Line]:
    yield Fact("Mixlab", VERSION)
    yield Fact("Python", platform.python_version())
    known = packages()
    core = [package for package in known if package.extra is None]
    for package in core:
        yield Fact(package.name, package.version or "not installed")
    if not core:
        yield Fact("torch", torch.__version__)
        advice = "Install it: pip install . in its folder."
        yield Shortcoming(
            "missing", "Mixlab runs from a folder and was not installed: it has no kernels built.", advice
        )
    if (torchvision := version_of("torchvision")) is not None:
        loads = guards.torchvision_operators_load()
        yield Fact("torchvision", torchvision if loads else f"{torchvision}, its operators do not load")
        if not loads:
            advice = (
                "Install the build that matches PyTorch: https://pytorch.org/get-started/locally has the command. "
                "Until then Mixlab's own operators stand in, and detectors are slower."
            )
            yield Shortcoming("slow", f"torchvision {torchvision} was built for another PyTorch.", advice)
    for package in known:
        if package.is_too_old:
            asked = f"{package.name} {package.version} is older than {package.least}, which Mixlab asks for."
            yield Shortcoming("wrong", asked, f"pip install --upgrade '{package.name}>={package.least}'")


def examine_extras() -> Iterator[Line]:
    """The packages of each extra, those of other extras that it includes left out."""
    known = [package for package in packages() if package.extra is not None and package.extra not in FOR_TOOLS]
    for extra in dict.fromkeys(package.extra for package in known):
        its = [package for package in known if package.extra == extra]
        absent = [package.name for package in its if package.version is None]
        versions = [f"{package.name} {package.version}" for package in its if package.version is not None]
        yield Fact(str(extra), ", ".join([*versions, *(f"no {name}" for name in absent)]))
        if absent:
            what = f"The extra {extra!r} is not complete: no {', '.join(absent)}."
            yield Shortcoming("missing", what, f"pip install 'mixlab[{extra}]', if you need it.")


def examine_kernels() -> Iterator[Line]:
    loaded, asked = kernels(), os.environ.get(VARIABLE)
    if loaded is None:
        reason = reason_without_kernels() or "The reason is not known."
        yield Fact("kernels", f"none. {reason}")
        what = f"Kernels do not run, which makes the program two to four times slower. {reason}"
        yield Shortcoming("slow", what, advice_without_kernels(asked))
        return
    yield Fact("kernels", f"vectors of {loaded.lanes} numbers ({VECTORS[loaded.lanes]})")
    if asked is not None and asked.isdecimal() and int(asked) <= loaded.lanes and loaded.lanes < widest():
        what = f"{VARIABLE}={asked} keeps the kernels to vectors of {loaded.lanes}; this processor has {widest()}."
        yield Shortcoming("slow", what, f"Unset {VARIABLE}.")


def widest() -> int:
    """The numbers in the widest vectors of this processor."""
    advertised = instruction_sets()
    return 16 if "avx512f" in advertised else 8 if "avx2" in advertised and "fma" in advertised else 4


def advice_without_kernels(asked: str | None) -> str:
    if asked == "0":
        return f"Unset {VARIABLE}."
    if sys.platform != "linux":
        return "Everything is computed by PyTorch, and is right. torch.compile makes it faster."
    return "Install a C compiler (Debian: apt-get install gcc), then Mixlab again: pip install --force-reinstall ."


def examine_threads() -> Iterator[Line]:
    threads, processors, quota = torch.get_num_threads(), usable_processors(), allowed_processors()
    yield Fact("threads", f"{threads} of PyTorch")
    limit = "" if quota >= NO_LIMIT else f", {quota} of them by the quota of the container"
    yield Fact("processors", f"{processors} of {os.cpu_count()} for this process{limit}")
    set_by = [f"{name}={os.environ[name]}" for name in THREAD_VARIABLES if name in os.environ]
    if set_by:
        yield Fact("set", " ".join(set_by))
    usable = min(processors, quota)
    if threads > usable:
        what = f"PyTorch starts {threads} threads where {usable} can run: they wait for each other."
        yield Shortcoming("slow", what, f"Set OMP_NUM_THREADS={usable}, or call torch.set_num_threads({usable}).")
    elif threads == 1 and usable > 1 and set_by:
        what = f"{' '.join(set_by)} keeps PyTorch to 1 of {usable} processors."
        yield Shortcoming("slow", what, f"Unset it, or set it to {usable}, unless several programs share this machine.")
    if hasattr(os, "getloadavg"):
        yield Fact("load", f"{os.getloadavg()[0]:.1f} programs wanted to run in the last minute")


def examine_gpu() -> Iterator[Line]:
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            yield Fact(f"cuda:{index}", f"{about.name}, {about.total_memory / 2**30:.0f} GiB")
    elif torch.backends.mps.is_available():
        yield Fact("mps", "Apple's GPU")
    else:
        yield Fact("GPU", "none that PyTorch can use")
        if shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists():
            what = f"There is an NVIDIA GPU, and PyTorch {torch.__version__} cannot use it."
            yield Shortcoming("slow", what, "Install the build for its driver: https://pytorch.org/get-started/locally")


def examine_compiler() -> Iterator[Line]:
    paths = [path for name in (os.environ.get("CXX", ""), *COMPILERS) if name and (path := shutil.which(name))]
    yield Fact("for torch.compile", paths[0] if paths else "none")
    if not has_compiler():
        advice = "Install one (Debian: apt-get install g++) if you need torch.compile or `mixlab export --format aot`."
        yield Shortcoming("missing", "There is no C++ compiler: nothing can be compiled for a CPU.", advice)


SECTIONS: dict[str, Callable[[], Iterator[Line]]] = {
    "arithmetic": examine_bf16,
    "machine": examine_machine,
    "versions": examine_versions,
    "extras": examine_extras,
    "kernels": examine_kernels,
    "threads": examine_threads,
    "GPU": examine_gpu,
    "compiler": examine_compiler,
}
