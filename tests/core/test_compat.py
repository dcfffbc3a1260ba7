"""Private names of PyTorch are used in one file only."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import mixlab.core.compat as compat

PACKAGE = Path(compat.__file__).parent.parent
# Folders that have an underscore and are documented all the same.
ALLOWED = {
    "_dynamo": "the compiler's settings and counters",
    "_inductor": "packaging of compiled models",
    "_python_dispatch": "the documented place of TorchDispatchMode",
    "_pytree": "the same of tree_leaves",
}
SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "compat.py"]


def private_names(path: Path) -> Iterator[str]:
    """Names with one underscore in front that a file takes from torch: imported, or reached through `torch.`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            names = text.split(".") if re.fullmatch(r"torch(\.\w+)+", text) and ".ops.aten." not in text else []
        else:
            names = []
        yield from (name for name in names if re.fullmatch(r"_[A-Za-z]\w*", name))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_file_uses_a_private_name(path: Path) -> None:
    assert set(private_names(path)) <= set(ALLOWED)


def test_each_line_says_in_which_releases_it_was_seen() -> None:
    lines = Path(compat.__file__).read_text(encoding="utf-8").splitlines()
    private = [line for line in lines if re.search(r"torch[\w.]*\._\w|import _\w|_dynamo_marked|_compiled_call", line)]
    assert private
    for line in private:
        assert re.search(r"\d\.\d+ to \d\.\d+$", line), line
