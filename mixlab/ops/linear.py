"""Linear layers of inference on a CPU: oneDNN's product instead of the BLAS's, with the activation in the same pass.

On the machine of the performance notes it reaches 85 to 105 billion multiply-accumulates per second where `F.linear`
reaches 55 to 95, most where there are few rows. Whatever else follows the arithmetic (gradients, a compiler, a tracer,
autocast, counters) gets `F.linear`.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixlab.guards import is_transformed

After = Literal["none", "relu", "gelu"]
IN_CACHE = 5 * 2**19  # bytes of an intermediate result that caches of two cores hold


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, after: After = "none") -> Tensor:
    """`linear_reference` by the fastest way for what is given."""
    if not is_plain_inference(x, weight, bias):
        return linear_reference(x, weight, bias, after)
    algorithm = "none" if after == "gelu" else ""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, after, [], algorithm)
    return product


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, after: After = "none") -> Tensor:
    product = F.linear(x, weight, bias)
    return product if after == "none" else F.relu(product) if after == "relu" else F.gelu(product)


def is_plain_inference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether these are float32 numbers of a CPU and nobody follows what is computed from them."""
    if torch.is_grad_enabled() or not (is_plain_float(x) and is_plain_float(weight)) or not has_onednn():
        return False
    if bias is not None and not is_plain_float(bias):
        return False
    followed = is_transformed() or torch.is_autocast_enabled("cpu") or torch._C._len_torch_dispatch_stack() > 0
    return not followed and x.numel() > 0 and (weight.is_mkldnn or weight.is_contiguous())


def is_plain_float(x: Tensor) -> bool:
    return type(x) in (Tensor, nn.Parameter) and x.dtype is torch.float32 and x.device.type == "cpu"


def has_onednn() -> bool:
    """Whether PyTorch was built with it and it is switched on."""
    return HAS_OPERATOR and bool(torch.backends.mkldnn.enabled)


HAS_OPERATOR = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def rows_in_cache(rows: int, width: int) -> int:
    """How many rows of so many float32 numbers are computed at a time, so that what follows finds them in the cache."""
    fitting = max(256, IN_CACHE // (4 * width))
    pieces = -(-rows // fitting)
    return -(-rows // max(pieces, 1))
