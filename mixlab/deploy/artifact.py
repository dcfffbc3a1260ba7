"""Files of PyTorch itself: the traced graph (torch.export), and the graph compiled to machine code (AOTInductor)."""

import json
import zipfile
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mixlab.core.errors import ExportError
from mixlab.deploy.graph import Program, first_lines, quietly
from mixlab.deploy.onnx import METADATA_KEY, Run

ABOUT = "mixlab.json"
COMPILED = "aotinductor"  # a folder in the archive of a compiled graph


# -- torch.export --------------------------------------------------------------------------------


def write_program(program: Program, path: Path, about: Mapping[str, Any]) -> None:
    """The graph and its parameters as `torch.export.load` reads them."""
    with quietly():
        torch.export.save(program, str(path), extra_files={ABOUT: json.dumps(about)})


def run_program(path: str | PathLike[str]) -> Run:
    with quietly():
        module = torch.export.load(str(path)).module()

    def run(images: Tensor) -> Tensor:
        with torch.no_grad():
            scores: Tensor = module(images)
        return scores

    return run


def about_program(path: str | PathLike[str]) -> dict[str, Any]:
    files = {ABOUT: ""}
    with quietly():
        torch.export.load(str(path), extra_files=files)
    return json.loads(files[ABOUT] or "{}")


# -- AOTInductor ---------------------------------------------------------------------------------


def write_compiled(program: Program, path: Path, about: Mapping[str, Any]) -> None:
    """The graph as a library for this kind of processor, with its parameters."""
    import torch._inductor

    settings = {"aot_inductor.metadata": {METADATA_KEY: json.dumps(about)}}
    try:
        with torch.no_grad(), quietly():
            torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=settings)
    except Exception as error:  # whatever the compiler says
        raise ExportError(f"The graph cannot be compiled: {first_lines(error)}") from error


def load_compiled(path: str | PathLike[str]) -> Any:
    import torch._inductor

    with quietly():
        return torch._inductor.aoti_load_package(str(path))


def run_compiled(path: str | PathLike[str]) -> Run:
    compiled = load_compiled(path)

    def run(images: Tensor) -> Tensor:
        with torch.no_grad():
            scores: Tensor = compiled(images)
        return scores

    return run


def about_compiled(path: str | PathLike[str]) -> dict[str, Any]:
    return json.loads(load_compiled(path).get_metadata().get(METADATA_KEY, "{}"))


def is_compiled(path: str | PathLike[str]) -> bool:
    """Whether a .pt2 file holds machine code, not a graph."""
    with zipfile.ZipFile(path) as archive:
        return any(COMPILED in Path(name).parts[1:-1] for name in archive.namelist())  # the first part is free
