"""What a mixer is, and how a file in this folder announces one."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from torch import Tensor, nn

from mixlab.core.choices import Choice, Registry
from mixlab.core.grid import Grid
from mixlab.models.modules import Shared as Shared


class Mixer(nn.Module):
    """`mixer(tokens, grid) -> tokens`, both (B, N, C). A purely spatial mixer returns zeros for the class tokens."""

    mixes_channels: ClassVar[bool] = False  # True: the block needs no channel MLP
    mixes_class_tokens: ClassVar[bool] = False  # True: class tokens see the image
    crosses: ClassVar[bool] = False  # True: `split` and `attend` let one scale look at another (coscale)
    trains_compiled: ClassVar[bool] = True  # False: compiled code is for inference only
    exports: ClassVar[bool] = True  # False: it cannot become a graph for other programs
    initializes_itself: ClassVar[bool] = False  # True: the model's init scheme leaves it alone
    explains: ClassVar[tuple[str, ...]] = ()  # what `explain` returns
    linears: ClassVar[tuple[str, ...]] = ()  # linear layers that are only called, so that their weights may be packed
    calls: ClassVar[tuple[str, ...]] = ()  # attributes that are `Shared`
    outruns_compilers: ClassVar[bool] = False  # True: compiled inference on a CPU calls its block as it is
    direction: str = ""  # where a walk over the tokens starts, for the titles of what it explains

    @property
    def last_layer(self) -> nn.Linear | None:
        """The linear layer whose output is the mixer's, so that a factor behind it may move into it."""
        return None

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        raise NotImplementedError

    def explain(self, tokens: Tensor, grid: Grid) -> dict[str, Tensor]:
        """What the mixer can show about itself for these tokens, one tensor per name in `explains`."""
        return {}

    def kernel_sources(self) -> tuple[nn.Module, ...]:
        """The modules whose kernels `explain` shows: an implicit filter, or depthwise convolutions in a row."""
        return ()

    def resize(self, name: str, value: Tensor, source: Grid | None) -> Tensor:
        """A stored tensor of another grid as this mixer's own; `source` is None where it is not known."""
        return value


@dataclass(frozen=True)
class BlockParts:
    """What a mixer's file hands to one block: a mixer per branch, and a step on the tokens before the norm."""

    branches: Sequence[Mixer]
    position: Callable[[Tensor, Grid], Tensor] | None = None


@dataclass(frozen=True)
class StageParts:
    """The parts of all blocks of a stage, and the modules that they call as `Shared`.

    `blocks_per_layer` blocks in a row count as one layer where a learning rate decays by layers.
    """

    blocks: Sequence[BlockParts]
    shared: nn.Module | None = None
    blocks_per_layer: int = 1

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
