"""From the last tokens to class scores: pooling and the classifier."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from mixlab.core.choices import Choice, NoOptions, Registry
from mixlab.core.errors import require
from mixlab.core.grid import Grid
from mixlab.core.guards import check_precision
from mixlab.models.layers import SquaredReLU
from mixlab.models.modules import Modules

POOLS: Registry[Callable[..., "Pool"]] = Registry("pool")
HEADS: Registry[Callable[..., "Head"]] = Registry("head")
PoolChoice = Annotated[Choice, POOLS]
HeadChoice = Annotated[Choice, HEADS]
Merge = Literal["mean", "concatenate"]


class Pool:
    """The tokens of an image as one vector of `parts` times their width."""

    parts = 1
    reads_class_tokens = False
    reads_whole_image = False  # False: behind the last mixing most image tokens are not read any more

    def __call__(self, tokens: Tensor, grid: Grid) -> Tensor:
        raise NotImplementedError


@POOLS.register("mean")
class MeanPool(Pool):
    """The mean of the image tokens."""

    reads_whole_image = True

    def __init__(self, options: NoOptions, class_tokens: int) -> None:
        pass

    def __call__(self, tokens: Tensor, grid: Grid) -> Tensor:
        return grid.image(tokens).mean(1)


@POOLS.register("center", formerly=("centre",))
class CentrePool(Pool):
    """The mean of the patches that touch the image's centre: four on an even grid, one on an odd grid."""

    def __init__(self, options: NoOptions, class_tokens: int) -> None:
        pass

    def __call__(self, tokens: Tensor, grid: Grid) -> Tensor:
        rows = slice((grid.height - 1) // 2, grid.height // 2 + 1)
        columns = slice((grid.width - 1) // 2, grid.width // 2 + 1)
        return grid.to_map(tokens)[:, :, rows, columns].mean((2, 3))


@dataclass(frozen=True)
class BilateralOptions:
    merge: Merge = "concatenate"


@POOLS.register("bilateral", BilateralOptions)
class BilateralPool(Pool):
    """The first and the last patch, side by side or their mean."""

    def __init__(self, options: BilateralOptions, class_tokens: int) -> None:
        self.parts = 2 if options.merge == "concatenate" else 1

    def __call__(self, tokens: Tensor, grid: Grid) -> Tensor:
        ends = torch.stack([tokens[:, grid.prefix], tokens[:, -1]], 1)
        return ends.flatten(1) if self.parts > 1 else ends.mean(1)


@dataclass(frozen=True)
class ClassTokenOptions:
    merge: Merge = "mean"


@POOLS.register("class_token", ClassTokenOptions)
class ClassTokenPool(Pool):
    """The class tokens (usually one), side by side or their mean."""

    reads_class_tokens = True

    def __init__(self, options: ClassTokenOptions, class_tokens: int) -> None:
        self.parts = class_tokens if options.merge == "concatenate" else 1

    def __call__(self, tokens: Tensor, grid: Grid) -> Tensor:
        read = tokens[:, : grid.prefix]
        return read.flatten(1) if self.parts > 1 else read.mean(1)


def pool(choice: Choice, class_tokens: int) -> Pool:
    return POOLS.builder(choice)(choice.options, class_tokens)


class Readout(nn.Module):
    """Final norm and pooling of the last stages' tokens, (B, width); several scales are summed with learned weights."""

    def __init__(self, pool: Pool, dim: int, *, scales: int, norm_first: bool, eps: float) -> None:
        super().__init__()
        self.pool = pool
        self.norm_first = norm_first
        self.width = dim * pool.parts
        normed = dim if norm_first else self.width
        self.norms: Modules[nn.LayerNorm] = Modules(nn.LayerNorm(normed, eps=eps) for _ in range(scales))
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
    """Features (B, dim) in, class scores out. `classifier` is the last linear layer, behind `width` channels."""

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


@dataclass(frozen=True)
class LinearHeadOptions:
    """`norm`: a layer norm in front of the linear layer, as in the released Vision-LSTM weights."""

    norm: bool = False
    eps: float = 1e-5


@HEADS.register("linear", LinearHeadOptions)
class LinearHead(Head):
    """One linear layer."""

    def __init__(self, dim: int, num_classes: int, options: LinearHeadOptions) -> None:
        super().__init__(dim, num_classes)
        self.norm = nn.LayerNorm(dim, eps=options.eps) if options.norm else None

    def hidden(self, features: Tensor) -> Tensor:
        return features if self.norm is None else self.norm(features)


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
