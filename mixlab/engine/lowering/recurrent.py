"""LSTM layers over the columns and rows of maps, in both directions at once."""

from mixlab.engine.draft import Draft, Tokens
from mixlab.engine.kernels.recurrent import AT_ONCE, Run
from mixlab.engine.lowering.base import lowers
from mixlab.engine.steps import Pending, Place, Sum
from mixlab.models.mixers.recurrent import Recurrent2d, RecurrentLayer


@lowers(Recurrent2d)
def recurrent_2d(draft: Draft, mixer: Recurrent2d, x: Place | Pending, tokens: Tokens, onto: Sum | None) -> Place:
    draft.require(not tokens.grid.prefix, "class tokens need zeros in their places")
    draft.require(mixer.merge == "concatenate", "columns and rows are added")
    draft.require(mixer.fusion is not None, "there is no layer after the cells")
    runs = [
        run
        for layer, vertical in ((mixer.vertical, True), (mixer.horizontal, False))
        if layer is not None
        for run in runs_of(draft, layer, vertical=vertical)
    ]
    width, place = sum(run.units for run in runs), draft.there(x)
    fusion = draft.linear_weights(mixer.fusion, width, tokens.channels)  # type: ignore[arg-type]
    out = draft.claim(tokens.rows * width)
    images = max(1, AT_ONCE // (4 * width * tokens.grid.tokens))
    for first in range(0, tokens.images, images):
        some = tokens._replace(
            images=min(images, tokens.images - first), place=place.at(first * tokens.grid.tokens * tokens.channels)
        )
        draft.lstm(runs, some.place, some.size, out.at(first * tokens.grid.tokens * width))
    return draft.linear(fusion, out, tokens.rows, onto=onto)


def runs_of(draft: Draft, layer: RecurrentLayer, *, vertical: bool) -> list[Run]:
    """The directions of one layer, with weights that kernels can read."""
    draft.exactly(layer, RecurrentLayer)
    draft.require(layer.cell == "lstm", f"there is no kernel for the cell {layer.cell}")
    runs = [Run(weights, vertical, bool(index)) for index, weights in enumerate(layer.directions())]
    for run in runs:
        for weight in run.weights:
            draft.tensor(weight)
    return runs
