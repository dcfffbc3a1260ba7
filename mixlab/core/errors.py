"""Errors that a user can cause. Each says what was given, what was expected and what to do."""

import difflib
from collections.abc import Iterable


class MixlabError(Exception):
    """Base of every error that input to Mixlab can cause."""


class ConfigError(MixlabError, ValueError):
    """An unknown name, an unknown option, or a value that does not fit."""


class ImageError(MixlabError, ValueError):
    """An image tensor that the model cannot take."""


class WeightsError(MixlabError, ValueError):
    """A weight file that is broken, foreign, or belongs to another model."""


class MacsError(MixlabError, RuntimeError):
    """An operator whose multiply-accumulates are not known."""


class PrecisionError(MixlabError, RuntimeError):
    """A precision that this machine advertises but cannot run."""


class CompileError(MixlabError, RuntimeError):
    """torch.compile cannot work here."""


def require(condition: bool, wanted: str) -> None:
    """Raise a ConfigError that says what is needed, unless it holds."""
    if not condition:
        raise ConfigError(f"Needed: {wanted}")


def near_misses(given: str, known: Iterable[str]) -> str:
    """The tail of an unknown-name error: close matches if there are any, else all names."""
    names = sorted(known)
    close = difflib.get_close_matches(given, names, n=5, cutoff=0.5)
    if close:
        return f"Did you mean {' or '.join(repr(name) for name in close)}?"
    return f"Known: {', '.join(names)}."


class DataError(MixlabError, ValueError):
    """A dataset that is missing, empty, broken or does not fit the model."""


class UnreadableImage(MixlabError, OSError):
    """A file that is no image, or a broken one."""


class TrainingError(MixlabError, RuntimeError):
    """A run that cannot start, or had to stop."""


class StoppedEarly(TrainingError):
    """Ctrl-C or a signal ended several runs; what is done is kept."""


class HubError(MixlabError, OSError):
    """Weights that cannot be fetched, or that are not what they are said to be."""


class ExportError(MixlabError, RuntimeError):
    """A model that cannot be exported, or whose export does not compute the same."""
