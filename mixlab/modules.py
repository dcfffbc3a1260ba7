"""A list of modules that says what it holds. At run time it is plain `nn.ModuleList`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)

if TYPE_CHECKING:

    class Modules(nn.ModuleList, Generic[M]):
        def __iter__(self) -> Iterator[M]: ...
        def __getitem__(self, index: int) -> M: ...  # type: ignore[override]
else:
    Modules = nn.ModuleList
