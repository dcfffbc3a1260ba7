"""The library and what it says of itself; one that cannot serve tells why."""

import pathlib
import shutil
import subprocess
import sys
import warnings

import pytest
import torch

from mixlab.engine import kernels as native
from mixlab.engine.kernels import kernels, library
from mixlab.engine.kernels.layouts import FINGERPRINT, LayoutError, fingerprint_of, read_layouts
from mixlab.engine.kernels.library import Kernels, LibraryError, load, loaded, without_library

needs_kernels = pytest.mark.skipif(kernels() is None, reason="installed without a compiler")
POINT = "struct point 8\nfield x int 0 4\nfield y int 4 4\n"


def library_path() -> str:
    found = kernels()
    assert found is not None
    return str(found.library._name)


# -- what it says of itself ------------------------------------------------------------------------


@needs_kernels
def test_the_library_is_of_the_sources_that_this_python_was_written_for() -> None:
    found = kernels()
    assert found is not None
    assert fingerprint_of(found.describe("")) == FINGERPRINT, "layouts.h has changed: this is the new fingerprint"


@needs_kernels
def test_every_kernel_takes_a_struct_that_is_described() -> None:
    found = kernels()
    assert found is not None
    assert set(found.layouts.taken.values()) <= set(found.layouts.structs)


@needs_kernels
def test_a_struct_of_another_size_is_refused() -> None:
    found = kernels()
    assert found is not None
    with pytest.raises(RuntimeError, match="norm"):
        found.run("norm", found.layouts.structs["linear"]())


def test_a_description_becomes_classes() -> None:
    layouts = read_layouts("constant WIDE 32\nactivation gelu 1\nkernel move point\n" + POINT)
    point = layouts.structs["point"](x=3, y=4)
    assert (point.x, point.y) == (3, 4)
    assert (layouts.constants, layouts.activations, layouts.taken) == ({"WIDE": 32}, {"gelu": 1}, {"move": "point"})


def test_structs_lie_in_structs() -> None:
    layouts = read_layouts(POINT + "struct line 16\nfield start struct_point 0 8\nfield end struct_point 8 8\n")
    assert layouts.structs["line"](end=layouts.structs["point"](y=7)).end.y == 7


def test_a_field_at_another_offset_is_refused() -> None:
    with pytest.raises(LayoutError, match="y of the struct point lies at 6"):
        read_layouts(POINT.replace("int 4 4", "int 6 4"))


def test_a_struct_of_another_size_than_its_fields_is_refused() -> None:
    with pytest.raises(LayoutError, match="12 bytes"):
        read_layouts(POINT.replace("point 8", "point 12"))


def test_a_field_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(LayoutError, match="complex"):
        read_layouts(POINT.replace("y int", "y complex"))


# -- why there is none -----------------------------------------------------------------------------


def test_kernels_that_serve_have_no_reason() -> None:
    assert (native.reason_without_kernels() is None) == (kernels() is not None)


def test_a_file_that_is_no_library_says_so(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "_kernels.so"
    path.write_text("no library")
    with pytest.raises(LibraryError, match="does not load"):
        Kernels(str(path), 16)


def test_a_library_of_older_sources_says_so() -> None:
    with pytest.raises(LibraryError, match="older sources"):
        Kernels(torch._C.__file__, 16)


@needs_kernels
def test_a_library_of_other_sources_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "FINGERPRINT", FINGERPRINT + 1)
    with pytest.raises(LibraryError, match="older sources or from newer"):
        Kernels(library_path(), 16)


@needs_kernels
def test_a_library_without_one_of_its_functions_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = read_layouts("kernel unheard_of point\n" + POINT)
    monkeypatch.setattr(library, "read_layouts", lambda _: layouts)
    with pytest.raises(LibraryError, match="lacks the functions unheard_of"):
        Kernels(library_path(), 16)


def test_a_library_for_another_python_is_named(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    assert "not built" in str(without_library().reason)
    (tmp_path / "_kernels.cpython-39-other.so").touch()
    found = without_library()
    assert found.is_unexpected
    assert "cpython-39-other.so was built for another Python" in str(found.reason)


@pytest.mark.parametrize(("value", "words"), [("0", "switches them off"), ("many", "none of 0, 4, 8 and 16")])
def test_the_environment_is_a_reason(monkeypatch: pytest.MonkeyPatch, value: str, words: str) -> None:
    monkeypatch.setenv(library.VARIABLE, value)
    found = load()
    assert found.kernels is None
    assert words in str(found.reason)


def test_other_systems_are_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(library.VARIABLE, raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    found = load()
    assert "darwin" in str(found.reason)
    assert not found.is_unexpected


def test_one_warning_if_kernels_were_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load", lambda: library.Loaded(None, "It is broken.", is_unexpected=True))
    ask = loaded.__wrapped__
    with pytest.warns(UserWarning, match="without its kernels.*It is broken"):
        ask()


def test_no_warning_if_none_were_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loaded.__wrapped__().kernels is None


BUILD = """
import mixlab
mixlab.create_model("vil_pico", num_classes=2)
print(mixlab.engine.kernels.reason_without_kernels())
"""


@needs_kernels
def test_a_damaged_library_warns_once_and_pytorch_does_the_work(tmp_path: pathlib.Path) -> None:
    package = pathlib.Path(native.__file__).parents[2]
    shutil.copytree(package, tmp_path / "mixlab", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (tmp_path / pathlib.Path(library_path()).relative_to(package.parent)).write_text("no library")
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "does not load" in done.stdout
    assert done.stderr.count("Mixlab runs without its kernels") == 1
