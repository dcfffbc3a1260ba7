"""What lies between blocks: patches of maps as rows for a product, copies and sums of tokens, and their mean."""

from typing import NamedTuple

import torch
from torch import Tensor

from mixlab.engine.kernels import kernels, pointer, structure

PatchesAbout = structure("patches")
PutAbout = structure("put")
MeanAbout = structure("mean")


class Patch(NamedTuple):
    """The kernel of a convolution: rows, columns, stride and zeros around the map. `channels_first`: numbers of a patch
    are in the order channels, rows, columns, as in the weight of a convolution; else rows, columns, channels.
    """

    high: int
    wide: int
    stride: int
    padding: tuple[int, int]
    channels_first: bool

    def outputs(self, height: int, width: int, after: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        """Rows and columns of patches, with so many zeros below and to the right beside the usual padding."""
        (above, before), (below, behind) = self.padding, after
        rows = (height + 2 * above + below - self.high) // self.stride + 1
        return rows, (width + 2 * before + behind - self.wide) // self.stride + 1


def cut_patches(x: Tensor, patch: Patch, after: tuple[int, int] = (0, 0)) -> Tensor:
    """(B, C, H, W) of any strides as rows (B, patches, numbers of a patch) for a product with the weight."""
    found, (images, channels, height, width) = kernels(), x.shape
    assert found is not None
    rows, columns = patch.outputs(height, width, after)
    out = x.new_empty(images, rows * columns, channels * patch.high * patch.wide)
    strides = (x.stride(0), x.stride(2), x.stride(3), x.stride(1))
    sizes = (images, height, width, channels, patch.high, patch.wide, patch.stride, *patch.padding, rows, columns)
    about = PatchesAbout(pointer(x), pointer(out), *strides, *sizes, patch.channels_first, torch.get_num_threads())
    found.run("patches", about)
    return out


def mean_tokens(x: Tensor) -> Tensor:
    """The mean of (B, N, C) over N, with contiguous channels."""
    found, (images, tokens, width) = kernels(), x.shape
    assert found is not None
    out = x.new_empty(images, width)
    sizes = (x.stride(0), x.stride(1), width, tokens, images, width, torch.get_num_threads())
    found.run("mean", MeanAbout(pointer(x), pointer(out), *sizes))
    return out


def put_tokens(x: Tensor, y: Tensor | None, out: Tensor) -> None:
    """Write x or x + y (B, N, C) with contiguous channels to `out`; expanded axes are repeated."""
    found, (images, rows, width) = kernels(), out.shape
    assert found is not None
    own = (x.stride(0), x.stride(1), *((0, 0) if y is None else y.stride()[:2]), out.stride(0), out.stride(1))
    pointers = (pointer(one) for one in (x, y, out))
    found.run("put", PutAbout(*pointers, *own, images, rows, width, torch.get_num_threads()))
