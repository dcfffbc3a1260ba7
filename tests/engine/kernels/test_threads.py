"""The pool of threads: results do not depend on it, and nothing that a program does with threads stops it."""

import ctypes
import os
import pathlib
import signal
import struct
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F

from mixlab.engine.kernels import kernel_number, kernels, pointer, structure
from mixlab.engine.kernels.library import team_starter
from mixlab.engine.kernels.linear import run_linear
from mixlab.engine.kernels.norm import Norm
from mixlab.engine.kernels.processors import NO_LIMIT, allowed_processors

needs_kernels = pytest.mark.skipif(kernels() is None, reason="installed without a compiler")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
CALLS = 10_000
FORKS = 20


def norm_apart(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """A norm of rows as the only step of a plan, which is what the pool serves."""
    found, out = kernels(), torch.empty_like(x)
    assert found is not None
    places = {"one": pointer(x), "out": pointer(out), "weight": pointer(norm.weight), "bias": pointer(norm.bias)}
    sizes = {"rows": len(x), "width": x.shape[1], "one_row": x.shape[1], "threads": torch.get_num_threads()}
    about = structure("norm")(**places, **sizes, eps=norm.eps)
    found.run_steps(
        bytearray(struct.pack("lN", kernel_number("norm"), ctypes.sizeof(about)) + bytes(about)), is_whole=True
    )
    return out


class Caller(threading.Thread):
    """Calls a tiny kernel many times with all numbers of threads, and keeps what went wrong."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls, self.wrong = calls, 0
        self.x, self.norm = torch.randn(100, 16), Norm(torch.rand(16), torch.rand(16), 1e-5)
        self.expected = F.layer_norm(self.x, (16,), self.norm.weight, self.norm.bias)

    def run(self) -> None:
        for call in range(self.calls):
            torch.set_num_threads(1 + call % 4)
            self.wrong += not norm_apart(self.x, self.norm).allclose(self.expected, atol=1e-5)


def fork_and_call() -> int:
    """Call kernels in a child process, which has to make workers of its own; returns its exit code."""
    caller = Caller(50)  # made here: PyTorch's own operators hang in a child if their threads have worked before
    child = os.fork()
    if child == 0:
        caller.run()
        os._exit(min(caller.wrong, 1))
    for _ in range(1000):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        threading.Event().wait(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


@needs_kernels
@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_two_threads_that_call_while_the_process_forks() -> None:
    threads = torch.get_num_threads()
    callers = [Caller(CALLS // 2) for _ in range(2)]
    try:
        for caller in callers:
            caller.start()
        codes = [fork_and_call() for _ in range(FORKS)]
        for caller in callers:
            caller.join(60)
    finally:
        torch.set_num_threads(threads)
    assert not any(caller.is_alive() for caller in callers)
    assert [caller.wrong for caller in callers] == [0, 0]
    assert codes == [0] * FORKS


@pytest.mark.skipif(kernels() is None or team_starter() is None, reason="PyTorch has other threads")
def test_calls_among_the_operators_of_pytorch_wake_no_workers() -> None:
    """They run in the team of PyTorch's own, with which a pool would fight for the processors."""
    command = [sys.executable, "-c", AMONG]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "0\n"


@needs_kernels
def test_results_are_the_same_bits_in_every_run() -> None:
    x, weight = torch.randn(700, 128), torch.randn(256, 128)
    first = run_linear(x, weight, None, "gelu")
    assert all(run_linear(x, weight, None, "gelu").equal(first) for _ in range(50))


AMONG = """
import torch
from mixlab.engine.kernels import kernels
from mixlab.engine.kernels.library import team_starter
from mixlab.engine.kernels.linear import run_linear
run_linear(torch.randn(700, 128), torch.randn(256, 128), None)
print(kernels().library.mixlab_count_workers())
"""
COUNT = """
import os, sys, torch
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])
torch.set_num_threads(8)
from mixlab.engine.kernels import kernels
from mixlab.engine.kernels.norm import Norm
from tests.engine.kernels.test_threads import norm_apart
norm_apart(torch.randn(700, 128), Norm(torch.ones(128), None, 1e-5))
print(kernels().library.mixlab_count_workers(), len(os.sched_getaffinity(0)))
"""


@needs_kernels
@pytest.mark.parametrize("processors", [1, 2])
def test_there_are_no_more_threads_than_processors(processors: int) -> None:
    command = [sys.executable, "-c", COUNT, str(processors)]
    workers, allowed = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert workers == min(allowed, allowed_processors()) - 1


def test_the_tightest_quota_of_all_groups_counts(tmp_path: pathlib.Path) -> None:
    groups, mount = tmp_path / "cgroup", tmp_path / "fs"
    (mount / "outer/inner").mkdir(parents=True)
    groups.write_text("0::/outer/inner\n")
    assert allowed_processors(groups, mount) == NO_LIMIT
    (mount / "outer/inner/cpu.max").write_text("max 100000\n")
    assert allowed_processors(groups, mount) == NO_LIMIT
    (mount / "outer/cpu.max").write_text("150000 100000\n")
    assert allowed_processors(groups, mount) == 2


def test_quotas_of_the_first_kind_of_groups_count_too(tmp_path: pathlib.Path) -> None:
    groups, folder = tmp_path / "cgroup", tmp_path / "fs/cpu,cpuacct/box"
    folder.mkdir(parents=True)
    groups.write_text("5:memory:/box\n4:cpu,cpuacct:/box\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert allowed_processors(groups, tmp_path / "fs") == NO_LIMIT
    (folder / "cpu.cfs_quota_us").write_text("50000\n")
    assert allowed_processors(groups, tmp_path / "fs") == 1


def test_systems_without_control_groups_have_no_limit(tmp_path: pathlib.Path) -> None:
    assert allowed_processors(tmp_path / "none", tmp_path) == NO_LIMIT
