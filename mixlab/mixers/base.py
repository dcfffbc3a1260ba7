"""What a mixer is, and how a file in this folder announces one."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from torch import Tensor, nn

from mixlab.choices import Choice, Registry
from mixlab.grid import Grid


class Mixer(nn.Module):
    """`mixer(tokens, grid) -> tokens`, both (B, N, C).

    A mixer owns what it is given: `tokens` come fresh from a norm and may be overwritten when no
    gradient is recorded. A purely spatial mixer returns zeros for the class tokens.
    """

    mixes_channels: ClassVar[bool] = False  # True: the block needs no channel MLP
    initialises_itself: ClassVar[bool] = False  # True: the model's init scheme leaves it alone
    explains: ClassVar[tuple[str, ...]] = ()  # what `explain` returns

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        raise NotImplementedError

    def explain(self, tokens: Tensor, grid: Grid) -> dict[str, Tensor]:
        """What the mixer can show about itself for these tokens, one tensor per name in `explains`."""
        return {}

    def resize(self, name: str, value: Tensor, source: Grid | None) -> Tensor:
        """A stored tensor of another grid as this mixer's own; `source` is None where it is not known."""
        return value


@dataclass(frozen=True)
class BlockParts:
    """What a mixer's file hands to one block: a mixer per branch, and a term added before the norm."""

    branches: Sequence[Mixer]
    position: nn.Module | None = None


@dataclass(frozen=True)
class StageParts:
    """The parts of all blocks of a stage, and modules they share (registered once, by the stage)."""

    blocks: Sequence[BlockParts]
    shared: nn.Module | None = None

    @classmethod
    def of(cls, mixers: Iterable[Mixer]) -> "StageParts":
        """One mixer per block, nothing shared."""
        return cls([BlockParts([mixer]) for mixer in mixers])


BuildStage = Callable[[Any, int, int, Grid], StageParts]
MIXERS: Registry[BuildStage] = Registry("mixer")
MixerChoice = Annotated[Choice, MIXERS]


def heads_for(dim: int, head_dim: int) -> int:
    """The largest head count that divides `dim` and keeps heads of `head_dim` channels or more."""
    return next(heads for heads in range(max(dim // head_dim, 1), 0, -1) if dim % heads == 0)
