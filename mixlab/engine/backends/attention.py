"""Softmax attention by our own kernel, where the linear layers read and write."""

from torch import Tensor

from mixlab.engine.kernels.attention import attention_gradient, fits, run_attention
from mixlab.engine.reasons import needs, why_no_wide_kernel
from mixlab.ops.attention import ATTENTION
from mixlab.ops.operator import Backend, Flat, TrainingBackend


def supports(qkv: Tensor, heads: int) -> str | None:
    return why_no_wide_kernel(qkv) or needs(fits(qkv, heads), "queries, keys and values that do not lie side by side")


def train(qkv: Tensor, heads: int) -> tuple[Tensor, list[Tensor]]:
    logs = qkv.new_empty(qkv.shape[0], heads, qkv.shape[1])
    out = run_attention(qkv, heads, logs)
    return out, [out, logs]


def gradient(gradients: list[Tensor], inputs: Flat, saved: list[Tensor], needed: list[bool], heads: int) -> Flat:
    (qkv,), (out, logs) = inputs, saved
    assert qkv is not None
    return [attention_gradient(qkv, heads, out, logs, gradients[0])]


ATTENTION.serve(Backend("kernel", supports, run_attention))
ATTENTION.train(TrainingBackend("kernel", supports, train, gradient))
