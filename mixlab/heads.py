"""From the last tokens to class scores: pooling and the classifier."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor, nn

from mixlab.choices import Choice, NoOptions, Registry
from mixlab.grid import Grid
from mixlab.layers import SquaredReLU

POOLS: Registry[Callable[[Tensor, Grid], Tensor]] = Registry("pool")
HEADS: Registry[Callable[..., "Head"]] = Registry("head")
PoolChoice = Annotated[Choice, POOLS]
HeadChoice = Annotated[Choice, HEADS]


@POOLS.register("mean")
def mean_pool(tokens: Tensor, grid: Grid) -> Tensor:
    """The mean of the image tokens, (B, C)."""
    return grid.image(tokens).mean(1)


@POOLS.register("class_token")
def class_token_pool(tokens: Tensor, grid: Grid) -> Tensor:
    """The mean of the class tokens (usually one), (B, C)."""
    return tokens[:, : grid.prefix].mean(1)


class Head(nn.Module):
    """Features (B, C) in, class scores out. `classifier` is the last linear layer, or nothing."""

    def __init__(self, dim: int, width: int, num_classes: int) -> None:
        super().__init__()
        self.dim = dim
        self.width = width
        self.classifier: nn.Module = classifier(width, num_classes)

    def hidden(self, features: Tensor) -> Tensor:
        """What stands in front of the classifier."""
        return features

    def forward(self, features: Tensor) -> Tensor:
        return self.classifier(self.hidden(features))


def classifier(width: int, num_classes: int) -> nn.Module:
    """A linear layer; none at all for 0 classes."""
    return nn.Linear(width, num_classes) if num_classes else nn.Identity()


@HEADS.register("linear")
class LinearHead(Head):
    """One linear layer."""

    def __init__(self, dim: int, num_classes: int, options: NoOptions) -> None:
        super().__init__(dim, dim, num_classes)


@dataclass(frozen=True)
class MlpHeadOptions:
    ratio: float = 4.0
    dropout: float = 0.0
    eps: float = 1e-5


@HEADS.register("mlp", MlpHeadOptions)
class MlpHead(Head):
    """Linear, squared ReLU, norm, dropout, linear: the head of ConvFormer and CAFormer."""

    def __init__(self, dim: int, num_classes: int, options: MlpHeadOptions) -> None:
        width = int(options.ratio * dim)
        super().__init__(dim, width, num_classes)
        self.fc = nn.Linear(dim, width)
        self.act = SquaredReLU()
        self.norm = nn.LayerNorm(width, eps=options.eps)
        self.dropout = nn.Dropout(options.dropout)

    def hidden(self, features: Tensor) -> Tensor:
        return self.dropout(self.norm(self.act(self.fc(features))))


def head(choice: Choice, dim: int, num_classes: int) -> Head:
    return HEADS.builder(choice)(dim, num_classes, choice.options)
