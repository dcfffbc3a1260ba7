"""Projections with blocks of 4 x 4 weights by our own kernel, without products of matrices."""

from torch import Tensor

from mixlab.engine.kernels.heads import blocks_gradient, from_heads, to_heads
from mixlab.engine.kernels.mlstm import BLOCK, WIDTH
from mixlab.engine.reasons import needs, why_no_kernel
from mixlab.ops.blockdiagonal import BLOCK_HEADS
from mixlab.ops.operator import Backend, Flat, TrainingBackend


def supports(x: Tensor, weight: Tensor, bias: Tensor | None, heads: int) -> str | None:
    reason = why_no_kernel(x, weight, bias) or needs(x.ndim == 3, "tokens that are not (B, T, C)")
    if reason:
        return reason
    channels = x.shape[2]
    fits = weight.shape == (channels // BLOCK, BLOCK, BLOCK) and (bias is None or bias.shape == (channels,))
    return needs(channels % (heads * WIDTH) == 0 and fits, f"other blocks than {BLOCK} x {BLOCK}, or narrow heads")


def project(x: Tensor, weight: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    return to_heads(x.contiguous(), weight, None if bias is None else bias.contiguous(), heads)


def train(x: Tensor, weight: Tensor, bias: Tensor | None, heads: int) -> tuple[Tensor, list[Tensor]]:
    return project(x, weight, bias, heads), []


def gradient(gradients: list[Tensor], inputs: Flat, saved: list[Tensor], needed: list[bool], heads: int) -> Flat:
    (x, weight, _), gradient = inputs, gradients[0].contiguous()
    assert x is not None
    assert weight is not None
    to_weight = to_bias = None
    if needed[1] or needed[2]:
        to_weight, to_bias = blocks_gradient(x.contiguous(), gradient)
    return [from_heads(gradient, weight.mT) if needed[0] else None, to_weight, to_bias]


BLOCK_HEADS.serve(Backend("kernel", supports, project))
BLOCK_HEADS.train(TrainingBackend("kernel", supports, train, gradient))
