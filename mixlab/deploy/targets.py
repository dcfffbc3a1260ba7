"""The kinds of files that a model can be exported to: what each needs, how it is written, run, and asked about."""

import importlib.util
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from mixlab.core.errors import CompileError, ConfigError, MixlabError, near_misses
from mixlab.deploy.artifact import (
    about_compiled,
    about_program,
    is_compiled,
    run_compiled,
    run_program,
    write_compiled,
    write_program,
)
from mixlab.deploy.graph import Program
from mixlab.deploy.onnx import Run, about_onnx, run_onnx, write_onnx
from mixlab.engine.compile import has_compiler

AnyPath = str | PathLike[str]


@dataclass(frozen=True)
class Target:
    """One kind of file."""

    name: str
    suffix: str
    write: Callable[[Program, Path, Mapping[str, Any]], None]
    run: Callable[[AnyPath], Run]
    about: Callable[[AnyPath], dict[str, Any]]
    libraries: tuple[str, ...] = ()
    compiles: bool = False

    def check(self) -> None:
        """Everything that writing needs is installed."""
        missing = [library for library in self.libraries if importlib.util.find_spec(library) is None]
        if missing:
            told = ", ".join(missing)
            raise MixlabError(
                f"Export to {self.name} needs {told}, which is not installed: pip install 'mixlab[export]'"
            )
        if self.compiles and not has_compiler():
            raise CompileError(
                "Export to aot needs a C++ compiler and found none ($CXX, g++, clang++, cl). Install one (Debian: "
                "apt-get install g++), or export to onnx or torch_export."
            )


TARGETS = {
    target.name: target
    for target in (
        Target("onnx", ".onnx", write_onnx, run_onnx, about_onnx, libraries=("onnx", "onnxscript", "onnxruntime")),
        Target("torch_export", ".pt2", write_program, run_program, about_program),
        Target("aot", ".pt2", write_compiled, run_compiled, about_compiled, compiles=True),
    )
}


def target_of(name: str) -> Target:
    if name not in TARGETS:
        raise ConfigError(f"Unknown export format {name!r}. {near_misses(name, TARGETS)}")
    return TARGETS[name]


def target_of_file(path: AnyPath) -> Target:
    """The kind of a file that `export` wrote."""
    if not Path(path).is_file():
        raise ConfigError(f"The exported model {path} {'is a folder' if Path(path).is_dir() else 'does not exist'}.")
    suffix = Path(path).suffix
    if suffix == ".onnx":
        return TARGETS["onnx"]
    if suffix != ".pt2":
        raise ConfigError(f"Exported models end in .onnx or .pt2; got {path}.")
    try:
        return TARGETS["aot" if is_compiled(path) else "torch_export"]
    except zipfile.BadZipFile as error:
        raise ConfigError(f"{path} is not an exported model: {error}") from error
