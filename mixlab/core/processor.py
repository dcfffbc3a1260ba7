"""Facts about the processor that need no arithmetic: its name, its instruction sets, how much of it is ours."""

import os
import platform
import re
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
# Instruction sets that decide about speed, of x86 and ARM processors, as Linux spells them
TELLING = (
    *("sse4_2", "avx", "fma", "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8"),
    *("asimd", "sve", "sve2", "bf16", "i8mm"),
)


def processor_name() -> str:
    """The name that the processor gives itself, or the kind of machine where the system does not say."""
    names = re.findall(r"model name\s*:\s*(.+)", read_cpu_info())
    return names[0].strip() if names else platform.processor() or platform.machine()


def instruction_sets() -> tuple[str, ...]:
    """The instruction sets in `TELLING` that the processor advertises; empty where the system does not say."""
    advertised = re.findall(r"^(?:flags|Features)\s*:\s*(.+)$", read_cpu_info(), re.MULTILINE)
    flags = set(advertised[0].split()) if advertised else set()
    return tuple(name for name in TELLING if name in flags)


def usable_processors() -> int:
    """The processors that this process may run on: its affinity where the system has one, else all of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int | None:
    """The machine's main memory; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def read_cpu_info() -> str:
    try:
        return CPU_INFO.read_text()
    except OSError:
        return ""
