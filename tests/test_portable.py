"""Windows and macOS: everything runs there without kernels, and what only POSIX systems have is looked for first."""

import ast
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

import mixlab
from mixlab.data import loader, open_data
from mixlab.data.loader import Loader
from mixlab.deploy import serve
from mixlab.workflows.transfer import folder_name

PACKAGE = Path(mixlab.__file__).parent
ROOT = PACKAGE.parent
POSIX_MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "termios", "tty"}
POSIX_NAMES = {
    *("fork", "forkpty", "getloadavg", "getuid", "geteuid", "killpg", "mkfifo", "sched_getaffinity", "setsid"),
    *("sched_setaffinity", "statvfs", "sysconf", "uname", "waitpid", "SIGALRM", "SIGHUP", "SIGKILL", "SIGUSR1"),
}
# Places that ask first whether the system has it, or that only run on Linux
GUARDED = {
    "core/guards.py": {"fork", "resource", "waitpid"},  # behind a processor that Linux says has AMX
    "core/processor.py": {"sched_getaffinity", "sysconf"},
    "deploy/doctor.py": {"getloadavg"},
    "deploy/serving/metrics.py": {"sysconf"},  # behind a file that only Linux has
    "evals/cost/speed.py": {"resource"},
}
PROC_READERS = {  # read files of Linux, which are ASCII
    *("core/guards.py", "core/processor.py", "deploy/serving/metrics.py", "engine/kernels/processors.py"),
    *("evals/cost/speed.py", "training/fits.py"),
}


def sources() -> list[tuple[str, ast.Module]]:
    files = sorted(PACKAGE.rglob("*.py"))
    return [(file.relative_to(PACKAGE).as_posix(), ast.parse(file.read_text(encoding="utf-8"))) for file in files]


def posix_names(tree: ast.Module) -> set[str]:
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    of_modules = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("os", "signal")
    }
    return (imported & POSIX_MODULES) | (of_modules & POSIX_NAMES)


def test_what_only_posix_has_is_used_in_guarded_places_alone() -> None:
    used = {name: names for name, tree in sources() if (names := posix_names(tree))}
    assert used == GUARDED


def test_no_module_imports_at_its_top_what_only_posix_has() -> None:
    for name, tree in sources():
        imports = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
        assert not POSIX_MODULES & set(imports), name


def test_text_files_are_utf_8_on_every_system() -> None:
    """Where nothing is said, Windows takes another encoding."""
    for name, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and name not in PROC_READERS:
                said = any(keyword.arg == "encoding" for keyword in node.keywords)
                if node.func.attr == "read_text":
                    assert said or node.args, f"{name}:{node.lineno}"
                if node.func.attr == "write_text":
                    assert said, f"{name}:{node.lineno}"


@pytest.mark.parametrize("system", ["win32", pytest.param("darwin", marks=pytest.mark.heavy)])
def test_training_and_inference_run_on_another_system(system: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.other_system", system, str(tmp_path)]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stdout + child.stderr
    assert "Kernels do not run" in child.stdout


def as_tensor(image: object) -> torch.Tensor:
    return torch.ones(1, 4, 4)


def test_workers_start_where_nothing_can_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "START", "spawn")
    data = open_data("digits", "val")
    batches = Loader(data, as_tensor, batch_size=200, workers=1, train=False, seed=0).epoch(0)
    assert sum(len(batch.images) for batch in batches) == len(data)


def test_datasets_travel_to_workers() -> None:
    data = open_data("digits", "val")
    assert pickle.loads(pickle.dumps(data)).class_names == data.class_names


@pytest.mark.parametrize(("system", "reused"), [("posix", True), ("nt", False)])
def test_a_port_is_shared_with_no_other_server(system: str, reused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "name", system)
    with serve.bound("127.0.0.1", 0) as door:
        assert bool(door.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)) is reused


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ("vtab/pets:data", "vtab-pets"),
        ("/data/pets", "-data-pets"),
        ("C:\\data\\pets", "C-data-pets"),
        ("D:/data/pets", "D-data-pets"),
    ],
)
def test_datasets_have_names_that_folders_can_have(data: str, name: str) -> None:
    assert folder_name(data) == name


@pytest.mark.heavy
def test_it_installs_without_a_compiler(tmp_path: Path) -> None:
    """In a fresh environment that sees the packages of this one."""
    hidden = shutil.ignore_patterns(".*", "*.so", "build", "*.egg-info", "__pycache__", "site", "runs", "tests")
    shutil.copytree(ROOT, tmp_path / "source", ignore=hidden)
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    seen = [path for path in sys.path if path.endswith("site-packages")]
    (site,) = (tmp_path / "venv").rglob("site-packages")
    for old in (*site.glob("setuptools*"), *site.glob("pkg_resources"), *site.glob("_distutils_hack")):
        shutil.rmtree(old)  # Python 3.11 brings one of its own, which is too old
    (site / "distutils-precedence.pth").unlink(missing_ok=True)
    (site / "outer.pth").write_text("\n".join(seen) + "\n", encoding="utf-8")
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MIXLAB_NATIVE")}
    variables |= {"CC": "/bin/false", "CXX": "/bin/false"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(python), *arguments]
        return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)

    installed = run("-m", "pip", "install", "--no-deps", "--no-build-isolation", str(tmp_path / "source"))
    assert installed.returncode == 0, installed.stdout + installed.stderr
    checkup = json.loads(run("-W", "ignore", "-m", "mixlab", "doctor", "--json").stdout)
    assert checkup["sections"]["kernels"]["kernels"].startswith("none")
    assert any("compiler" in problem["what"] for problem in checkup["problems"] if problem["severity"] == "slow")
    shown = run("-m", "mixlab", "info", "caformer_pico")
    assert shown.returncode == 0, shown.stderr
