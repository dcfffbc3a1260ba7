"""Factorised attention with convolutional position encodings."""

from mixlab.engine.backends.convattention import WINDOWS
from mixlab.engine.draft import Draft, Tokens
from mixlab.engine.lowering.base import lowers
from mixlab.engine.lowering.convolution import depthwise_weights
from mixlab.engine.steps import Pending, Place, Sum, Weights
from mixlab.models.mixers.convattention import ConvAttention, ConvRelativePosition


@lowers(ConvAttention)
def conv_attention(draft: Draft, mixer: ConvAttention, x: Place | Pending, tokens: Tokens, onto: Sum | None) -> Place:
    channels, images, grid = tokens.channels, tokens.images, tokens.grid
    draft.require(not mixer.softmax_query, "queries go through a softmax")
    draft.require(channels % mixer.heads == 0, "heads do not divide the channels")
    qkv = draft.linear_weights(mixer.qkv, channels, 3 * channels)
    project = draft.linear_weights(mixer.project, channels, channels)
    windows = [] if mixer.relative is None else relative_windows(draft, mixer, channels)
    scale = (channels // mixer.heads) ** -0.5 if mixer.scaled else 1.0
    wide = draft.linear(qkv, x, tokens.rows)
    near = draft.windows(windows, images, grid, channels, wide) if windows else None
    mixed = draft.factor(mixer.heads, images, grid, channels, scale, wide, near)
    return draft.linear(project, mixed, tokens.rows, onto=onto)


def relative_windows(draft: Draft, mixer: ConvAttention, channels: int) -> list[Weights]:
    """Kernels and biases of the relative encoding, which together see every channel."""
    relative = draft.shared(mixer.relative)
    draft.exactly(relative, ConvRelativePosition)
    assert isinstance(relative, ConvRelativePosition)
    draft.watch(relative.convs)
    windows = [depthwise_weights(draft, conv, conv.out_channels) for conv in relative.convs]
    for weight, _ in windows:
        height, width = weight.shape[2:]
        draft.require(height == width and width in WINDOWS, f"there is no kernel for windows of {height} x {width}")
    draft.require(sum(len(weight) for weight, _ in windows) == channels, "windows do not cover the channels")
    return windows
