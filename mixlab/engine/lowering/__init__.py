"""Models as steps: one file per kind of part, by exact classes. What is not known here runs as PyTorch."""

import importlib
import pkgutil


def register_all() -> None:
    """Import every file of this folder, each of which says what it lowers."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
