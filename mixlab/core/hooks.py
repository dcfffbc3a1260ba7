"""Where models ask whether somebody computes a call faster. The engine answers once it is imported.

Nothing here knows the engine: without it every question is answered with "compute it as it is written".
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


class Engine:
    """What an engine answers; this one leaves everything to PyTorch."""

    def serve(self, model: nn.Module, call: str, image: Tensor, visit: Any) -> Any:
        """The result of a call of a model on a batch of images, or None: compute it as it is written."""
        return None

    def derived(
        self, owner: nn.Module, key: Hashable, sources: Sequence[Tensor], make: Callable[[], T], *, cheap: bool
    ) -> T:
        """A value that is made from parameters of a module: made now, or kept from an earlier call."""
        return make()

    def part(self, part: nn.Module, tokens: Tensor, grid: Any) -> Tensor | None:
        """The output of a part of a model as one operator of compiled code, or None: compile what is written."""
        return None

    def report(self, model: nn.Module, image: Tensor) -> Any:
        """What runs where when the model is called on this batch, and why not elsewhere."""
        return None


_engine = Engine()
_silent: ContextVar[bool] = ContextVar("mixlab_without_engine", default=False)


def fill(engine: Engine) -> None:
    """Let this engine answer from now on."""
    global _engine
    _engine = engine


@contextmanager
def without_engine() -> Iterator[None]:
    """Compute everything inside as it is written in the models, in this thread."""
    token = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(token)


def is_silent() -> bool:
    """Whether this thread is inside `without_engine`."""
    return _silent.get()


def serve(model: nn.Module, call: str, image: Tensor, visit: Any = None) -> Any:
    """The result of `model.<call>(image)` from the engine, or None if the model has to compute it itself."""
    if torch.compiler.is_compiling() or _silent.get():
        return None
    return _engine.serve(model, call, image, visit)


def derived(
    owner: nn.Module, key: Hashable, sources: Sequence[Tensor], make: Callable[[], T], *, cheap: bool = False
) -> T:
    """A value that is made from these parameters of a module, and from nothing else that may change but what the key
    names. Eval mode may keep it until one of them changes. The first entry of a key is the value's name. A value
    that is `cheap` is made anew where comparing parameters takes longer: on a GPU.
    """
    if torch.compiler.is_compiling() or _silent.get():
        return make()
    return _engine.derived(owner, key, sources, make, cheap=cheap)


def part(module: nn.Module, tokens: Tensor, grid: Any) -> Tensor | None:
    """For code that is being compiled: the output of a part of a model as one operator, or None."""
    return _engine.part(module, tokens, grid) if torch.compiler.is_compiling() else None


def report(model: nn.Module, image: Tensor) -> Any:
    """What runs where when a model is called on this batch; None without an engine."""
    return _engine.report(model, image)
