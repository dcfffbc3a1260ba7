"""From the last tokens to class scores: pooling and the classifier."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from mixlab.choices import Choice, NoOptions, Registry
from mixlab.errors import require
from mixlab.grid import Grid
from mixlab.guards import check_precision
from mixlab.layers import SquaredReLU
from mixlab.modules import Modules

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


class Readout(nn.Module):
    """Final norm and pooling of the last stages' tokens, (B, C); several scales are summed with learned weights."""

    def __init__(self, pool: Choice, dim: int, *, scales: int, norm_first: bool, eps: float) -> None:
        super().__init__()
        self.pool = POOLS.builder(pool)
        self.norm_first = norm_first
        self.norms: Modules[nn.LayerNorm] = Modules(nn.LayerNorm(dim, eps=eps) for _ in range(scales))
        self.aggregate = nn.Conv1d(scales, 1, 1) if scales > 1 else None

    def forward(self, outputs: Sequence[tuple[Tensor, Grid]]) -> Tensor:
        features = []
        for norm, (tokens, grid) in zip(self.norms, outputs[-len(self.norms) :], strict=True):
            pooled = self.pool(norm(tokens), grid) if self.norm_first else norm(self.pool(tokens, grid))
            features.append(pooled)
        if self.aggregate is None:
            return features[0]
        return self.aggregate(torch.stack(features, 1)).squeeze(1)


class Head(nn.Module):
    """Features (B, C) in, class scores out. `classifier` is the last linear layer, behind `width` channels."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.width = width
        self.classifier: nn.Module = nn.Linear(width, num_classes) if num_classes else nn.Identity()

    def hidden(self, features: Tensor) -> Tensor:
        """What stands in front of the classifier."""
        return features

    def forward(self, features: Tensor) -> Tensor:
        check_precision(features)
        return self.classifier(self.hidden(features))


@HEADS.register("linear")
class LinearHead(Head):
    """One linear layer."""

    def __init__(self, dim: int, num_classes: int, options: NoOptions) -> None:
        super().__init__(dim, num_classes)


@dataclass(frozen=True)
class MlpHeadOptions:
    ratio: float = 4.0
    dropout: float = 0.0
    eps: float = 1e-5

    def __post_init__(self) -> None:
        require(self.ratio > 0 and 0 <= self.dropout < 1, f"a head ratio above 0 and a dropout in [0, 1); got {self}.")


@HEADS.register("mlp", MlpHeadOptions)
class MlpHead(Head):
    """Linear, squared ReLU, norm, dropout, linear: the head of ConvFormer and CAFormer."""

    def __init__(self, dim: int, num_classes: int, options: MlpHeadOptions) -> None:
        width = int(options.ratio * dim)
        super().__init__(width, num_classes)
        self.fc = nn.Linear(dim, width)
        self.act = SquaredReLU()
        self.norm = nn.LayerNorm(width, eps=options.eps)
        self.dropout = nn.Dropout(options.dropout)

    def hidden(self, features: Tensor) -> Tensor:
        return self.dropout(self.norm(self.act(self.fc(features))))


def head(choice: Choice, dim: int, num_classes: int) -> Head:
    """A head as chosen; none at all for 0 classes."""
    if num_classes == 0:
        return Head(dim, 0)
    return HEADS.builder(choice)(dim, num_classes, choice.options)
