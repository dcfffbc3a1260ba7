"""Functions with gradients of their own, as they are written: by PyTorch's operators, which can be differentiated."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mixlab.core.guards import is_many, is_transformed
from mixlab.engine.kernels import is_plain, kernels
from mixlab.ops.linear import needs_gradient


def may_train(*tensors: Tensor | None) -> bool:
    """Whether kernels may compute with these: plain float32 numbers of a CPU, of which a gradient is wanted."""
    if not (torch.is_grad_enabled() and needs_gradient(*tensors)) or is_transformed() or kernels() is None:
        return False
    if torch.is_autocast_enabled("cpu") or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all(one is None or is_plain(one) for one in tensors)


def is_as_written(*gradients: Tensor) -> bool:
    """Whether gradients ask for the way that can be differentiated, or that kernels have no part in."""
    if torch.is_grad_enabled() or is_transformed() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return any(is_many(one) or not is_plain(one) for one in gradients)


def anywhere(gradient: Tensor) -> Tensor:
    """An input for the gradient of what is linear: it is the same everywhere."""
    return torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device, requires_grad=True)


def written_gradients(
    function: Callable[..., Any], inputs: Sequence[Tensor | None], needed: Sequence[bool], *gradients: Tensor
) -> list[Tensor | None]:
    """Those of function(*inputs). Views keep them out of the history of the inputs."""
    with torch.enable_grad():
        views = [None if one is None else one.view_as(one) for one in inputs]
        out = function(*views)
    wanted: Any = [one for one, need in zip(views, needed, strict=True) if need]
    outputs = [out] if isinstance(out, Tensor) else list(out)
    found = iter(torch.autograd.grad(outputs, wanted, gradients, create_graph=torch.is_grad_enabled()))
    return [next(found) if need else None for need in needed]
