"""Packages import downwards only: no module imports from a storey above its own, not inside functions either."""

import ast
from collections.abc import Iterator
from pathlib import Path

from mixlab.core.moved import MOVED

ROOT = Path(__file__).parent.parent
STOREYS = (
    *("core", "ops", "models", "engine", "data", "metrics", "findings", "dense", "training", "evals", "deploy", "hub"),
    *("report", "workflows", "cli"),
)
LEVEL = {storey: level for level, storey in enumerate(STOREYS)}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "mixlab").rglob("*.py")
}
ENTRANCES = {"mixlab", "mixlab.__main__"}  # the package's own names, and `python -m mixlab`

# Modules that import from a storey above their own still, and which. This list only shrinks.
PENDING: set[tuple[str, str]] = set()


def imported_names(tree: ast.Module) -> Iterator[str]:
    """Dotted names that a file imports, at any depth, but for those that only a type checker reads."""
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name the whole path"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else str(node.module)
        nodes += ast.iter_child_nodes(node)


def storey(module: str) -> str:
    return module.partition(".")[2].partition(".")[0]


def imports() -> Iterator[tuple[str, str]]:
    for module, path in sorted(MODULES.items()):
        for name in imported_names(ast.parse(path.read_text(encoding="utf-8"))):
            if name.split(".")[0] == "mixlab":
                yield module, name


def test_every_module_stands_in_a_storey() -> None:
    assert {storey(module) for module in MODULES if module not in ENTRANCES} == set(STOREYS)


def test_imports_point_downwards() -> None:
    upwards = {
        (module, storey(name) or "mixlab")
        for module, name in imports()
        if module not in ENTRANCES and (name == "mixlab" or LEVEL[storey(name)] > LEVEL[storey(module)])
    }
    assert upwards - PENDING == set(), "these imports point upwards: use a hook in core, or move what they need down"
    assert PENDING - upwards == set(), "these imports are gone: take them off the list"


def test_no_module_imports_by_a_name_of_an_earlier_release() -> None:
    assert not [(module, name) for module, name in imports() if name in MOVED and name not in MODULES]


# Names of classes that occur twice still. This list only shrinks.
TWICE = {
    "Pool",
}


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for module, path in sorted(MODULES.items()):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    twice = {name: modules for name, modules in places.items() if len(set(modules)) > 1}
    assert {name: modules for name, modules in twice.items() if name not in TWICE} == {}, "name them for what they are"
    assert set(twice) >= TWICE, "these names are taken once only: take them off the list"
