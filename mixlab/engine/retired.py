"""Classes that pickles of whole models from release 0.1.0 name, and that stand for nothing any more."""

from typing import Any

from mixlab.core.parts import Part as Opaque


class Kept:
    """What a layer kept in eval mode."""

    def __setstate__(self, state: Any) -> None:
        pass


class Plans(Kept):
    """The plans of a residual sum."""


class Keeper(Kept):
    """The packed weights of a residual sum."""


__all__ = ["Keeper", "Kept", "Opaque", "Plans"]
