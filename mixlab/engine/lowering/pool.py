"""Average pooling minus its middle."""

from mixlab.engine.draft import Draft, Tokens
from mixlab.engine.lowering.base import lowers
from mixlab.engine.steps import Pending, Place, Sum
from mixlab.models.mixers.pool import Pool


@lowers(Pool)
def pool(draft: Draft, mixer: Pool, x: Place | Pending, tokens: Tokens, onto: Sum | None) -> Place:
    draft.require(not tokens.grid.prefix, "class tokens need zeros in their places")
    draft.require(mixer.size % 2 == 1, "the window has an even size")
    return draft.pool(mixer.size, tokens.size, tokens.channels, draft.there(x), onto)
