"""Every private name of PyTorch that Mixlab uses, each with the releases in which it was seen.

Nothing else in the package may use one: `tests/core/test_compat.py` reads the sources.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C import DispatchKey as DispatchKey  # 2.0 to 2.13
from torch._decomp import decomposition_table as decomposition_table  # 1.12 to 2.13
from torch._ops import OpOverload as OpOverload  # 1.12 to 2.13
from torch.nn.modules.module import _has_any_global_hook  # 1.13 to 2.13
from torch.utils._python_dispatch import _disable_current_modes  # 2.1 to 2.13

Function = TypeVar("Function", bound=Callable[..., object])
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # of modules: 2.0 to 2.13

# -- modules -------------------------------------------------------------------------------------


def has_global_hooks() -> bool:
    """Whether somebody listens to the calls of all modules."""
    return bool(_has_any_global_hook())


def listened_to(module: nn.Module) -> bool:
    """Whether somebody listens to or changes a module's call: hooks, pruning, another forward, a compiler."""
    own = module.__dict__
    if _has_any_global_hook() or any(own[name] for name in HOOKS):
        return True
    return "forward" in own or own.get("_compiled_call_impl") is not None  # 2.1 to 2.13


# -- who follows the arithmetic ------------------------------------------------------------------


def differentiates_forwards() -> bool:
    """Whether a level of forward-mode differentiation is open."""
    return torch.autograd.forward_ad._current_level >= 0  # 1.8 to 2.13


def transforms() -> bool:
    """Whether a functional transform (`vmap`, `grad`, `jvp`) is being computed."""
    return bool(torch._C._are_functorch_transforms_active())  # 2.0 to 2.13


def traces() -> bool:
    """Whether `torch.jit.trace` follows."""
    return torch._C._get_tracing_state() is not None  # 1.0 to 2.13


def has_modes() -> bool:
    """Whether modes see every operator: counters, fake tensors, tracers."""
    return bool(torch._C._len_torch_dispatch_stack() > 0)  # 2.0 to 2.13


def is_batched(x: Tensor) -> bool:
    """Whether several tensors travel as one, as `is_grads_batched` lets gradients: it has no memory of its own."""
    return bool(torch._C._functorch.is_legacy_batchedtensor(x))  # 2.0 to 2.13


def without_modes() -> AbstractContextManager[object]:
    """Nobody sees operators inside."""
    return _disable_current_modes()


def marked_constant(function: Function) -> Function:
    """Tells the compiler to call a function once and keep the answer. `torch.compiler.assume_constant_result` leaves
    the same mark, but imports the compiler, which would nearly double the time of every start.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined] # 2.0 to 2.13
    return function


# -- operators without a public name -------------------------------------------------------------


def has_onednn_products() -> bool:
    """Whether PyTorch was built with oneDNN's linear layers that take an activation along."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # 2.0 to 2.13


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """x W^T + b by oneDNN with "gelu" or "none" in the same pass; the weight may be packed."""
    form = "none" if activation == "gelu" else ""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], form)  # 2.0 to 2.13
    return out


def onednn_packed(weight: Tensor) -> Tensor:
    """A linear layer's weight in the order in which oneDNN reads it."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)  # 2.0 to 2.13
    return packed


def recurrent_kernel(cell: str) -> Any:
    """PyTorch's recurrent layers as functions of all their weights."""
    kernels = {"lstm": torch._VF.lstm, "gru": torch._VF.gru, "rnn": torch._VF.rnn_tanh}  # 1.0 to 2.13
    return kernels[cell]
