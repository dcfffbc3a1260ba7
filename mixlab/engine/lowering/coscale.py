"""Parallel blocks on several scales that exchange updates."""

from typing import Any

from torch import Tensor

from mixlab.engine.draft import CannotLower, Draft, Tokens
from mixlab.engine.lowering.blocks import positioned, residual_or_call
from mixlab.engine.lowering.layers import update_of
from mixlab.engine.steps import Place
from mixlab.models.coscale import EXCHANGES, CoscaleBlock, CoscaleGroup
from mixlab.models.layers import Residual


def group(draft: Draft, module: CoscaleGroup, outputs: list[Tokens], *, visited: bool) -> list[Tokens]:
    """The tokens of all stages after the parallel blocks; the first ones pass unchanged."""
    draft.exactly(module, CoscaleGroup)
    draft.watch(module.blocks)
    finer, scales = outputs[: -module.scales], outputs[-module.scales :]
    for index, part in enumerate(module.blocks):
        mark = draft.mark()
        try:
            scales = block(draft, part, scales)
        except CannotLower as reason:
            draft.rewind(mark)
            scales = called(draft, part, scales, str(reason))
        for scale, tokens in enumerate(scales if visited else (), len(finer)):
            draft.tell(f"coscale.blocks.{index}.{scale}", tokens)
    return finer + scales


def block(draft: Draft, module: CoscaleBlock, outputs: list[Tokens]) -> list[Tokens]:
    """Token mixing on each scale, the exchange, and the MLP on each scale."""
    draft.exactly(module, CoscaleBlock)
    draft.require(module.exchange is not EXCHANGES["direct"], "scales attend to each other")
    for residuals in (module.token, module.channel):
        draft.watch(residuals)
    placed = [positioned(draft, step, tokens) for step, tokens in zip(module.positions, outputs, strict=True)]
    updates = [updated(draft, part, tokens) for part, tokens in zip(module.token, placed, strict=True)]
    mixed = exchanged(draft, module, placed, updates)
    return [residual_or_call(draft, part, tokens) for part, tokens in zip(module.channel, mixed, strict=True)]


def updated(draft: Draft, module: Residual, tokens: Tokens) -> Place:
    """What the branches of a scale give before the exchange."""
    mark, path = draft.mark(), draft.path(module)
    try:
        with draft.part(path):
            return update_of(draft, module, tokens)
    except CannotLower as reason:
        draft.rewind(mark)
        draft.pytorch(path, str(reason))
    return draft.call(lambda x: module.update(x, tokens.grid), tokens.shape, (tokens.place, tokens.shape))


def exchanged(draft: Draft, module: CoscaleBlock, placed: list[Tokens], updates: list[Place]) -> list[Tokens]:
    """The residual sums with what the scales have exchanged."""
    grids, residuals, count = [tokens.grid for tokens in placed], list(module.token), len(placed)
    draft.pytorch(draft.path(module), "scales are exchanged and summed by operators of their own")

    def sums(*inputs: Tensor) -> list[Tensor]:
        given = dict(zip(residuals, inputs[count:], strict=True))
        stand_ins: Any = [Given(given[residual]) for residual in residuals]
        moved = module.exchange(stand_ins, list(zip(inputs[:count], grids, strict=True)))
        return [
            residual.merge(tokens, update) for residual, tokens, update in zip(residuals, inputs, moved, strict=False)
        ]

    shapes = [tokens.shape for tokens in placed]
    reads = [*zip([tokens.place for tokens in placed], shapes, strict=True), *zip(updates, shapes, strict=True)]
    places = draft.call_for(sums, shapes, *reads)
    return [tokens._replace(place=place) for tokens, place in zip(placed, places, strict=True)]


class Given:
    """Stands for a residual whose update is known."""

    def __init__(self, update: Tensor) -> None:
        self.known = update

    def update(self, tokens: Tensor, grid: object) -> Tensor:
        return self.known


def called(draft: Draft, module: CoscaleBlock, outputs: list[Tokens], reason: str) -> list[Tokens]:
    """A block by PyTorch."""
    draft.pytorch(draft.path(module), reason)
    grids, shapes = [tokens.grid for tokens in outputs], [tokens.shape for tokens in outputs]

    def run(*inputs: Tensor) -> list[Tensor]:
        return [tokens for tokens, _ in module(list(zip(inputs, grids, strict=True)))]

    places = draft.call_for(run, shapes, *zip([tokens.place for tokens in outputs], shapes, strict=True))
    return [tokens._replace(place=place) for tokens, place in zip(outputs, places, strict=True)]
