"""Depthwise convolutions."""

from torch import nn

from mixlab.engine.draft import Draft
from mixlab.engine.steps import Weights
from mixlab.models.layers import DepthwiseConv


def depthwise_weights(draft: Draft, conv: nn.Module, channels: int) -> Weights:
    """Kernels (C, 1, h, w), one for each of so many channels, and their biases."""
    draft.exactly(conv, nn.Conv2d, DepthwiseConv)
    assert isinstance(conv, nn.Conv2d)
    usual = conv.stride == conv.dilation == (1, 1) and conv.padding_mode == "zeros"
    draft.require(usual and conv.groups == channels, "a convolution is not depthwise, pixel by pixel")
    height, width = conv.kernel_size
    bias = conv.bias
    weight = draft.tensor(conv.weight, channels, 1, height, width)
    return weight, None if bias is None else draft.tensor(bias, channels)
