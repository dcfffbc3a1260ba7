"""Inverted separable convolution: linear with activation, depthwise convolution, linear."""

from mixlab.engine.draft import Draft, Tokens
from mixlab.engine.lowering.base import lowers
from mixlab.engine.lowering.convolution import depthwise_weights
from mixlab.engine.lowering.layers import activation
from mixlab.engine.steps import Pending, Place, Sum
from mixlab.models.mixers.sepconv import SepConv

WIDTHS = (5, 7)  # columns of a kernel that ours is faster for than the library's


@lowers(SepConv)
def sepconv(draft: Draft, mixer: SepConv, x: Place | Pending, tokens: Tokens, onto: Sum | None) -> Place:
    draft.require(not tokens.grid.prefix, "class tokens need zeros in their places")
    after, then = activation(draft, mixer.act)
    widen = draft.linear_weights(mixer.widen, tokens.channels)
    hidden = len(widen[0])
    narrow = draft.linear_weights(mixer.narrow, hidden, tokens.channels)
    taps = depthwise_weights(draft, mixer.depthwise, hidden)
    height, width = mixer.depthwise.kernel_size
    draft.require(height > 1 and width in WIDTHS, f"the library is as fast for kernels of {height} x {width}")
    wide = draft.linear(widen, x, tokens.rows, after, then)
    seen = draft.claim(tokens.rows * hidden)
    draft.depthwise(taps, tokens.size, (height // 2, width // 2), wide, seen)
    return draft.linear(narrow, seen, tokens.rows, onto=onto)
