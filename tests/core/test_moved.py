"""Names of modules of earlier releases."""

import importlib
import pickle
import subprocess
import sys

import pytest

import mixlab
from mixlab.core.moved import MOVED, new_name


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_name_gives_the_very_same_module(old: str) -> None:
    module = importlib.import_module(MOVED[old])
    assert importlib.import_module(old) is module
    assert module.__spec__ is not None
    assert module.__name__ == module.__spec__.name == MOVED[old]


def test_a_module_inside_a_package_that_moved_is_the_same_object() -> None:
    assert importlib.import_module("mixlab.mixers.mlstm") is importlib.import_module("mixlab.models.mixers.mlstm")
    assert importlib.import_module("mixlab.native.linear") is importlib.import_module("mixlab.engine.kernels.linear")


def test_a_name_that_never_was_stays_unknown() -> None:
    assert new_name("mixlab.layer") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("mixlab.layer")


def test_old_names_are_attributes_of_the_package() -> None:
    code = "import mixlab; print(mixlab.backbone.__name__, mixlab.evals.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["mixlab.models.backbone", "mixlab.evals"]


def test_an_old_pickle_finds_its_class() -> None:
    assert pickle.loads(b"cmixlab.grid\nGrid\n.") is importlib.import_module("mixlab.core.grid").Grid


def test_functions_that_hub_held_are_there() -> None:
    assert importlib.import_module("mixlab.hub").from_hub is mixlab.from_hub
