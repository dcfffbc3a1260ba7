"""Requirements beside what is installed."""

from importlib import metadata

import pytest

from mixlab.core import installed
from mixlab.core.installed import Package, numbers, packages


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.5.1+cpu", "onnx": "1.20.0"}
    lines = ["torch>=2.6", 'onnx>=1.17; extra == "export"', 'onnxscript; extra == "export"']
    monkeypatch.setattr(metadata, "requires", lambda name: [*lines, 'mixlab[export]; extra == "all"'])
    monkeypatch.setattr(installed, "version_of", versions.get)


@pytest.mark.usefixtures("asked")
def test_requirements_become_packages_and_extras_that_include_others_do_not() -> None:
    assert packages() == [
        Package("torch", None, "2.6", "2.5.1+cpu"),
        Package("onnx", "export", "1.17", "1.20.0"),
        Package("onnxscript", "export", None, None),
    ]


@pytest.mark.usefixtures("asked")
def test_an_old_release_is_noticed() -> None:
    assert [package.is_too_old for package in packages()] == [True, False, False]


def test_numbers_compare_as_numbers() -> None:
    assert numbers("2.10.0+cpu") > numbers("2.6")
    assert numbers("1.0rc1") == (1, 0)


def test_a_folder_that_was_not_installed_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert packages() == []
