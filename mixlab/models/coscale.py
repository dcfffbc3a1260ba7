"""The co-scale step behind the last stage: parallel blocks on several scales that exchange updates (CoaT, 5.1)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mixlab.core.errors import require
from mixlab.core.grid import Grid
from mixlab.models.layers import Mlp, Residual
from mixlab.models.modules import Modules
from mixlab.ops.exchange import exchange, move, total

Output = tuple[Tensor, Grid]
Position = Callable[[Tensor, Grid], Tensor]


@dataclass(frozen=True)
class Coscale:
    """Parallel blocks over the last `scales` stages. Table 7: exchange by interpolation, directly, or not at all.

    Stochastic depth masks token mixing there in both of its forms: what is exchanged belongs to all samples.
    """

    blocks: int = 6
    scales: int = 3
    exchange: Literal["interpolation", "direct", "none"] = "interpolation"

    def __post_init__(self) -> None:
        require(self.blocks >= 1 and self.scales >= 2, f"coscale with 1 block and 2 scales or more; got {self}.")


class CoscaleBlock(nn.Module):
    """A block per scale side by side: token mixing, exchange between the scales, one MLP for all of them."""

    def __init__(
        self,
        positions: Sequence[Position | None],
        token: Sequence[Residual],
        channel: Sequence[Residual],
        mlp: Mlp,
        exchange: str,
    ) -> None:
        super().__init__()
        self.positions = tuple(positions)
        self.token: Modules[Residual] = Modules(token)
        self.channel: Modules[Residual] = Modules(channel)
        self.mlp = mlp  # the residuals of `channel` call it without owning it
        self.exchange = EXCHANGES[exchange]

    def forward(self, outputs: list[Output]) -> list[Output]:
        placed = [
            (tokens if position is None else position(tokens, grid), grid)
            for position, (tokens, grid) in zip(self.positions, outputs, strict=True)
        ]
        updates = self.exchange(self.token, placed)
        mixed = [
            (residual.merge(tokens, update), grid)
            for residual, update, (tokens, grid) in zip(self.token, updates, placed, strict=True)
        ]
        return [(residual(tokens, grid), grid) for residual, (tokens, grid) in zip(self.channel, mixed, strict=True)]

    def explain(self, outputs: list[Output], scale: int) -> dict[str, Tensor]:
        """What the mixer of one scale shows for the tokens in front of this block; of an exchange it knows nothing."""
        (tokens, grid), position = outputs[scale], self.positions[scale]
        return explain_branches(self.token[scale], tokens if position is None else position(tokens, grid), grid)


class CoscaleGroup(nn.Module):
    """Takes and returns the list of (tokens, grid) of all stages; the first ones pass unchanged."""

    def __init__(self, blocks: Sequence[CoscaleBlock], scales: int) -> None:
        super().__init__()
        self.blocks: Modules[CoscaleBlock] = Modules(blocks)
        self.scales = scales
        self.checkpointing = False

    def forward(self, outputs: list[Output], visit: Callable[..., None] | None = None) -> list[Output]:
        finer, scales = outputs[: -self.scales], outputs[-self.scales :]
        for index, block in enumerate(self.blocks):
            if self.checkpointing and torch.is_grad_enabled():
                scales = checkpoint(block, scales, use_reentrant=False)
            else:
                scales = block(scales)
            if visit is not None:
                for scale, (tokens, grid) in enumerate(scales, len(finer)):
                    visit(f"coscale.blocks.{index}.{scale}", tokens, grid)
        return finer + scales

    def explain_each(self, outputs: list[Output], names: set[str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """What the blocks show at the places with these names, which are taken out of the set one after the other."""
        finer, scales = len(outputs) - self.scales, outputs[-self.scales :]
        for index, block in enumerate(self.blocks):
            for scale in range(self.scales):
                name = f"coscale.blocks.{index}.{finer + scale}"
                if name in names:
                    yield name, block.explain(scales, scale)
                    names.remove(name)
            if not names:
                return
            scales = block(scales)


def explain_branches(residual: Residual, tokens: Tensor, grid: Grid) -> dict[str, Tensor]:
    """What the mixers of a residual show; several branches are numbered."""
    branches: list[Any] = list(residual.branches)
    shown = [branch.mixer.explain(branch.norm(tokens), grid) for branch in branches]
    if len(shown) == 1:
        return dict(shown[0])
    return {f"{name}.{index}": value for index, one in enumerate(shown) for name, value in one.items()}


def keep_apart(residuals: Iterable[Residual], outputs: list[Output]) -> list[Tensor]:
    """Each scale sees only itself."""
    return [residual.update(tokens, grid) for residual, (tokens, grid) in zip(residuals, outputs, strict=True)]


def interpolate(residuals: Iterable[Residual], outputs: list[Output]) -> list[Tensor]:
    """Each scale mixes its own tokens; the results of all scales are summed on every grid."""
    updates, grids = keep_apart(residuals, outputs), [grid for _, grid in outputs]
    return exchange(updates, grids)


def attend_across(residuals: Iterable[Residual], outputs: list[Output]) -> list[Tensor]:
    """Each scale's queries attend to the keys and values of every scale on its grid, and the results add up."""
    branches: list[Any] = [residual.branches[0] for residual in residuals]
    grids = [grid for _, grid in outputs]
    parts = [branch.mixer.split(branch.norm(tokens)) for branch, (tokens, _) in zip(branches, outputs, strict=True)]
    return [
        total(
            branch.mixer.attend(query, move(key, source, grid), move(value, source, grid), grid)
            for (_, key, value), source in zip(parts, grids, strict=True)
        )
        for branch, (query, _, _), grid in zip(branches, parts, grids, strict=True)
    ]


EXCHANGES = {"none": keep_apart, "interpolation": interpolate, "direct": attend_across}
