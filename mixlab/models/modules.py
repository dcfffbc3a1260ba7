"""A list of modules that says what it holds (at run time it is plain `nn.ModuleList`), and a module in common."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)

if TYPE_CHECKING:

    class Modules(nn.ModuleList, Generic[M]):
        def __iter__(self) -> Iterator[M]: ...
        def __getitem__(self, index: int) -> M: ...  # type: ignore[override]
else:
    Modules = nn.ModuleList


class Shared:
    """A module that another one calls but does not own: it is registered once, by the stage."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *inputs: Any) -> Any:
        return self.module(*inputs)
