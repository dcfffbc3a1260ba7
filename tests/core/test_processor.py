"""What processors say about themselves."""

import os
from pathlib import Path

import pytest

from mixlab.core import processor

X86 = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t\t: fpu fma avx2 avx512f\n"
ARM = "processor\t: 0\nBogoMIPS\t: 50\nFeatures\t: fp asimd sve i8mm\n"


@pytest.fixture
def cpu_info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "cpuinfo")
    return tmp_path / "cpuinfo"


def test_an_x86_processor_has_a_name_and_its_instruction_sets(cpu_info: Path) -> None:
    cpu_info.write_text(X86)
    assert processor.processor_name() == "Some CPU @ 2 GHz"
    assert processor.instruction_sets() == ("fma", "avx2", "avx512f")


def test_an_arm_processor_has_its_instruction_sets(cpu_info: Path) -> None:
    cpu_info.write_text(ARM)
    assert processor.instruction_sets() == ("asimd", "sve", "i8mm")


def test_a_system_that_does_not_say_leaves_them_open(cpu_info: Path) -> None:
    assert processor.processor_name()
    assert processor.instruction_sets() == ()


def test_affinity_decides_how_many_processors_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 3, 5}, raising=False)
    assert processor.usable_processors() == 3


def test_all_processors_are_usable_where_there_is_no_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert processor.usable_processors() == 7


def test_memory_is_unknown_where_the_system_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sysconf", raising=False)
    assert processor.memory_bytes() is None
