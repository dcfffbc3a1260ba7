"""Softmax attention over the whole grid."""

from mixlab.engine.draft import Draft, Tokens
from mixlab.engine.lowering.base import lowers
from mixlab.engine.steps import Pending, Place, Sum
from mixlab.models.mixers.attention import Attention


@lowers(Attention)
def attention(draft: Draft, mixer: Attention, x: Place | Pending, tokens: Tokens, onto: Sum | None) -> Place:
    channels = tokens.channels
    draft.require(mixer.window is None, "it looks at a window")
    draft.require(mixer.relative_bias is None, "it has a relative bias")
    draft.require(channels % mixer.heads == 0, "heads do not divide the channels")
    qkv = draft.linear_weights(mixer.qkv, channels, 3 * channels)
    project = draft.linear_weights(mixer.project, channels, channels)
    wide = draft.linear(qkv, x, tokens.rows)
    mixed = draft.attention(mixer.heads, tokens.images, tokens.grid.tokens, channels, wide)
    return draft.linear(project, mixed, tokens.rows, onto=onto)
