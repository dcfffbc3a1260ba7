"""What all kernels ask of a call."""

from collections.abc import Sequence

from torch import Tensor

from mixlab.engine import kernels as library
from mixlab.ops.operator import why_not_plain

NARROW = "no vectors of 8 numbers or more, with which the kernel is the faster one"


def why_no_kernel(*tensors: Tensor | None) -> str | None:
    """None if our kernels are there and can read all of these in memory, else the reason why not."""
    return why_not_plain(*tensors) or (None if library.kernels() is not None else "the kernels are not loaded")


def why_no_wide_kernel(*tensors: Tensor | None) -> str | None:
    """The same for kernels that are the faster ones with wide vectors."""
    return why_no_kernel(*tensors) or (None if library.has_wide_vectors() else NARROW)


def needs(fits: bool, reason: str) -> str | None:
    return None if fits else reason


def vectors_fit(shape: Sequence[int], *vectors: Tensor | None) -> bool:
    """Whether vectors over channels have this shape and no gaps."""
    return all(vector is None or (vector.shape == shape and vector.is_contiguous()) for vector in vectors)
