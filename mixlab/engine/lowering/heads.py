"""The final norm with the pooling, and the head."""

from mixlab.engine.draft import Draft, Tokens
from mixlab.engine.steps import Place
from mixlab.models.heads import Head, Readout


def readout(draft: Draft, module: Readout, outputs: list[Tokens]) -> Place:
    """Features (B, width)."""
    used = outputs[-len(module.norms) :]
    grids = [tokens.grid for tokens in used]
    draft.pytorch(draft.path(module), "there are no kernels for pooling")
    reads = [(tokens.place, tokens.shape) for tokens in used]
    return draft.call(lambda *all: module(list(zip(all, grids, strict=True))), (used[0].images, module.width), *reads)


def head(draft: Draft, module: Head, features: Place, shape: tuple[int, int], classes: int) -> Place:
    """Class scores (B, classes)."""
    draft.pytorch(draft.path(module), "there are no kernels for so few rows")
    return draft.call(module, (shape[0], classes or shape[1]), (features, shape))
