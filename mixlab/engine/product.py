"""x W^T + b with an activation in the same pass: by our own product or by oneDNN's.

Which one is faster depends on rows and machine: our own was measured with vectors of 8 and 16 numbers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mixlab.core.compat import has_onednn_products, onednn_linear
from mixlab.engine.kernels import has_wide_vectors
from mixlab.engine.kernels import linear as native
from mixlab.engine.kernels.linear import AS_IT_IS, Then, run_linear
from mixlab.engine.reasons import NARROW, needs, why_no_kernel
from mixlab.ops.operator import why_not_plain

FEW_ROWS = 16  # below, oneDNN's product is the faster one
HAS_ONEDNN = has_onednn_products()
MISMATCH = "shapes that do not belong together, on which PyTorch has the word"


def why_not_layer(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """None if these are a layer and its input, else the reason why not."""
    fits = x.ndim >= 2 and weight.ndim == 2 and x.shape[-1] == weight.shape[1]
    fits = fits and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))
    return needs(fits, MISMATCH)


def why_not_own(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """None if our own product is to compute a layer, else the reason why not."""
    return (
        why_no_kernel(x, weight, bias)
        or why_not_layer(x, weight, bias)
        or needs(has_wide_vectors(), NARROW)
        or needs(x.numel() >= FEW_ROWS * x.shape[-1], "few rows, with which oneDNN is the faster one")
        or needs(native.fits(x, weight, bias), "rows that do not lie one after the other")
    )


def why_not_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """None if oneDNN can compute a layer, else the reason why not. It may have packed the weight."""
    packed = weight.is_mkldnn and weight.dtype is torch.float32
    return (
        needs(HAS_ONEDNN and bool(torch.backends.mkldnn.enabled), "PyTorch without oneDNN, or it is switched off")
        or why_not_plain(x, None if packed else weight, bias)
        or why_not_layer(x, weight, bias)
    )


def why_no_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """None if either of the two products can compute a layer."""
    return why_not_own(x, weight, bias) and why_not_onednn(x, weight, bias)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, after: str = "none", then: Then = AS_IT_IS
) -> Tensor:
    """f(x W^T + b) by whichever product is to compute it. `then`: a factor and a summand behind `squared_relu`."""
    if why_not_own(x, weight, bias) is None:
        return run_linear(x, weight, bias, after, then)
    return onednn_product(x, weight, bias, after, then)


def onednn_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, after: str = "none", then: Then = AS_IT_IS
) -> Tensor:
    inside = after if after == "gelu" else "none"  # oneDNN's ReLU makes a zero of what is not a number
    out = onednn_linear(x, weight, bias, inside)
    if after in ("relu", "squared_relu"):
        out = out.relu_().square_() if after == "squared_relu" else out.relu_()
        return out if then == AS_IT_IS else out.mul_(then[0]).add_(then[1])
    return F.silu(out, inplace=True) if after == "silu" else out
