"""Parts of a model that compiled code may call as one operator, and how that operator finds them."""

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from mixlab.core import hooks

F = TypeVar("F", bound=Callable[..., Tensor])
NUMBERS = itertools.count()
PARTS: "weakref.WeakValueDictionary[int, Part]" = weakref.WeakValueDictionary()


class Part(nn.Module):
    """`part(tokens, grid) -> tokens` of the same shape, whose forward is `in_one`."""

    calls: ClassVar[tuple[str, ...]] = ()  # attributes that may be `Shared`: of any module inside

    def __init__(self) -> None:
        super().__init__()
        self.number = numbered(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.number = numbered(self)  # a copy, or read from a file


def numbered(part: Part) -> Tensor:
    """A number that finds this part again. A tensor: compiled code takes it as it comes, so that graphs are shared."""
    number = next(NUMBERS)
    PARTS[number] = part
    return torch.tensor(number, device="cpu")


def in_one(forward: F) -> F:
    """A part's forward: code that is being compiled may call the part as one operator instead. A class that is made
    from the part's own and has another forward is compiled as it is written.
    """

    @functools.wraps(forward)
    def asked(self: Part, tokens: Tensor, grid: Any) -> Tensor:
        if torch.compiler.is_compiling() and type(self).forward is asked:
            served = hooks.part(self, tokens, grid)
            if served is not None:
                return served
        return forward(self, tokens, grid)

    return asked  # type: ignore[return-value]
