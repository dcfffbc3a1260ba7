"""Pooling and the norm over a whole image; `mixlab.ops.pool` and `mixlab.ops.norms` have the references."""

import torch
from torch import Tensor

from mixlab.engine.kernels import kernels, pointer, structure
from mixlab.engine.kernels.norm import Norm

PoolAbout = structure("pool")
WholeNormAbout = structure("whole_norm")


def run_pool(x: Tensor, size: int, *, back: bool = False) -> Tensor:
    """(B, H, W, C), contiguous: the mean over a window minus its middle; `back`: the gradient of that from the
    output's.
    """
    found, (images, height, width, channels) = kernels(), x.shape
    assert found is not None
    out = torch.empty_like(x)
    sizes = (images, height, width, channels, size, back, torch.get_num_threads())
    found.run("pool", PoolAbout(pointer(x), None, None, None, pointer(out), *sizes))
    return out


def run_whole_norm(x: Tensor, norm: Norm) -> Tensor:
    """(B, N, C), contiguous, normed over N and C together."""
    found, (images, rows, width) = kernels(), x.shape
    assert found is not None
    out = torch.empty_like(x)
    pointers = (pointer(x), pointer(norm.weight), pointer(norm.bias), pointer(out), None)
    found.run("whole_norm", WholeNormAbout(*pointers, images, rows, width, torch.get_num_threads(), norm.eps))
    return out
