"""What the doctor finds on machines that have something wrong with them."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mixlab.cli import main
from mixlab.core import guards
from mixlab.core.errors import PrecisionError
from mixlab.core.installed import Package
from mixlab.deploy import doctor
from mixlab.deploy.doctor import Checkup, Fact, Shortcoming, examine

Examine = Callable[[], object]


def facts(lines: object) -> dict[str, str]:
    return {line.name: line.value for line in lines if isinstance(line, Fact)}  # type: ignore[attr-defined]


def problems(lines: object) -> list[Shortcoming]:
    return [line for line in lines if isinstance(line, Shortcoming)]  # type: ignore[attr-defined]


def test_every_section_has_facts() -> None:
    checkup = examine()
    assert list(checkup.sections) == list(doctor.SECTIONS)
    assert all(checkup.sections.values())


def test_what_is_missing_is_no_fault() -> None:
    missing, slow = (
        Shortcoming("missing", "no compiler", "install one"),
        Shortcoming("slow", "no kernels", "build them"),
    )
    assert Checkup({}, (missing,)).is_healthy
    assert not Checkup({}, (missing, slow)).is_healthy


@pytest.mark.parametrize(("severity", "code"), [("missing", 0), ("slow", 1), ("wrong", 1)])
def test_the_exit_code_tells_of_faults(
    severity: doctor.Severity, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkup = Checkup({"machine": {"system": "some"}}, (Shortcoming(severity, "what there is", "what to do"),))
    monkeypatch.setattr(doctor, "examine", lambda: checkup)
    assert main(["doctor"]) == code
    assert f"{severity}: what there is\n    what to do" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out) == {
        "healthy": code == 0,
        "sections": {"machine": {"system": "some"}},
        "problems": [{"severity": severity, "what": "what there is", "advice": "what to do"}],
    }


def test_faults_come_before_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [Shortcoming("missing", "", ""), Shortcoming("slow", "", ""), Shortcoming("wrong", "", "")]
    monkeypatch.setattr(doctor, "SECTIONS", {"all": lambda: iter(lines)})
    assert [problem.severity for problem in examine().problems] == ["wrong", "slow", "missing"]


def test_kernels_that_do_not_run_are_slow_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "kernels", lambda: None)
    monkeypatch.setattr(doctor, "reason_without_kernels", lambda: "the library is for another machine")
    (problem,) = problems(doctor.examine_kernels())
    assert problem.severity == "slow"
    assert "the library is for another machine" in problem.what


def test_advice_about_kernels_fits_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.advice_without_kernels("0") == "Unset MIXLAB_NATIVE."
    monkeypatch.setattr(sys, "platform", "linux")
    assert "C compiler" in doctor.advice_without_kernels(None)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "computed by PyTorch" in doctor.advice_without_kernels(None)


def test_shorter_vectors_than_the_processor_has_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "kernels", lambda: type("Loaded", (), {"lanes": 4}))
    monkeypatch.setattr(doctor, "widest", lambda: 16)
    monkeypatch.delenv("MIXLAB_NATIVE", raising=False)
    assert not problems(doctor.examine_kernels())
    monkeypatch.setenv("MIXLAB_NATIVE", "4")
    (problem,) = problems(doctor.examine_kernels())
    assert (problem.severity, problem.advice) == ("slow", "Unset MIXLAB_NATIVE.")


def of_threads(
    monkeypatch: pytest.MonkeyPatch, *, threads: int, processors: int, quota: int = 1024
) -> list[Shortcoming]:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(doctor, "usable_processors", lambda: processors)
    monkeypatch.setattr(doctor, "allowed_processors", lambda: quota)
    return problems(doctor.examine_threads())


def test_more_threads_than_processors_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert not of_threads(monkeypatch, threads=4, processors=4)
    (by_affinity,) = of_threads(monkeypatch, threads=8, processors=4)
    assert "OMP_NUM_THREADS=4" in by_affinity.advice
    (by_quota,) = of_threads(monkeypatch, threads=4, processors=4, quota=2)
    assert (by_quota.severity, "OMP_NUM_THREADS=2" in by_quota.advice) == ("slow", True)


def test_one_thread_by_a_variable_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert [problem.severity for problem in of_threads(monkeypatch, threads=1, processors=4)] == ["slow"]
    assert not of_threads(monkeypatch, threads=1, processors=1)


def test_a_processor_that_traps_on_bf16_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def trap() -> None:
        raise PrecisionError("start Python with another variable")

    monkeypatch.setattr(guards, "check_bf16", trap)
    (problem,) = problems(doctor.examine_bf16())
    assert (problem.severity, problem.advice) == ("wrong", "start Python with another variable")


def test_old_packages_are_wrong_and_absent_ones_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [
        Package("torch", None, "2.6", "2.5"),
        Package("onnx", "export", "1.17", None),
        Package("ruff", "dev", None, None),
    ]
    monkeypatch.setattr(doctor, "packages", lambda: known)
    monkeypatch.setattr(doctor, "version_of", lambda name: None)
    assert [(problem.severity, "torch 2.5" in problem.what) for problem in problems(doctor.examine_versions())] == [
        ("wrong", True)
    ]
    (absent,) = problems(doctor.examine_extras())
    assert (absent.severity, "mixlab[export]" in absent.advice) == ("missing", True)


def test_a_torchvision_for_another_torch_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda name: "0.99")
    monkeypatch.setattr(guards, "torchvision_operators_load", lambda: False)
    assert [problem.severity for problem in problems(doctor.examine_versions())] == ["slow"]
    monkeypatch.setattr(guards, "torchvision_operators_load", lambda: True)
    assert not problems(doctor.examine_versions())


def test_little_shared_memory_ends_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SHARED_MEMORY", tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(total=2**26))
    assert [problem.severity for problem in problems(doctor.examine_machine())] == ["wrong"]


def test_a_gpu_that_torch_cannot_use_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: "somewhere" if name == "nvidia-smi" else None)
    assert [problem.severity for problem in problems(doctor.examine_gpu())] == ["slow"]


def test_no_compiler_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert facts(doctor.examine_compiler()) == {"for torch.compile": "none"}
    assert [problem.severity for problem in problems(doctor.examine_compiler())] == ["missing"]


def test_it_runs_where_the_system_has_no_affinity_and_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sched_getaffinity", "getloadavg", "sysconf"):
        monkeypatch.delattr(os, name, raising=False)
    checkup = examine()
    assert "load" not in checkup.sections["threads"]
    assert "memory" not in checkup.sections["machine"]
