"""Multiply-accumulates, counted operator by operator as the papers count them.

Products and convolutions count exactly; a Fourier transform its output times the logarithm of its size; norms and
resizing a few operations per element; activations, softmax, sums and pooling nothing. An operator that is in no list is
an error, never a silent zero.
"""

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from mixlab.core.errors import ConfigError, MacsError
from mixlab.models.backbone import Backbone
from mixlab.models.config import parse_image_size
from mixlab.models.ensemble import Ensemble

aten = torch.ops.aten

PER_OUTPUT_ELEMENT = {
    aten.native_layer_norm: 4,
    aten.native_group_norm: 4,
    aten.native_batch_norm: 2,
    aten.upsample_bilinear2d: 4,
    aten._upsample_bilinear2d_aa: 4,
    aten.grid_sampler_2d: 4,
}
FOURIER = {aten._fft_r2c, aten._fft_c2r, aten._fft_c2c}
FREE = {
    # moving and making data
    *(
        aten.clone,
        aten.copy_,
        aten._to_copy,
        aten.cat,
        aten.stack,
        aten.repeat,
        aten.constant_pad_nd,
        aten.flip,
        aten.roll,
    ),
    *(aten.empty, aten.zeros, aten.ones, aten.full, aten.arange, aten.scalar_tensor, aten.index, aten.index_select),
    *(aten.zeros_like, aten.ones_like, aten.empty_like, aten.full_like, aten._unsafe_view, aten.new_zeros),
    *(aten.new_empty, aten.new_ones, aten.new_full, aten.unsafe_split, aten.unsafe_chunk, aten.transpose_),
    *(aten.replication_pad2d, aten.promote_types, aten.linspace, aten.as_strided_),
    # reductions, pooling, softmax, what is elementwise but not tagged so
    *(aten.sum, aten.mean, aten.amax, aten.amin, aten.cumsum, aten.avg_pool2d, aten.max_pool2d_with_indices),
    *(aten._adaptive_avg_pool2d, aten.upsample_nearest2d, aten.prod),
    *(aten._softmax, aten._safe_softmax, aten._log_softmax, aten.log_sigmoid_forward, aten.triu),
}


def macs(model: nn.Module, image_size: int | tuple[int, int]) -> int:
    """Multiply-accumulates of one image of this size (a side, or height and width)."""
    return sum(macs_by_part(model, image_size).values())


def macs_by_part(model: nn.Module, image_size: int | tuple[int, int]) -> dict[str, int]:
    """The same by part of the data flow: `stem`, `stages.0`, ..., `coscale`, and `head` for everything behind them.

    The parts of an ensemble are its members. Of a model on a backbone, what is built on it is part of the `head`.
    """
    height, width = parse_image_size(image_size)
    if isinstance(model, Ensemble):
        return {f"members.{index}": macs(member, image_size) for index, member in enumerate(model.members)}
    found = next(((name, part) for name, part in model.named_modules() if isinstance(part, Backbone)), None)
    if found is None:
        raise ConfigError(f"macs takes a Mixlab model, or a module that holds one; got a {type(model).__name__}.")
    path, backbone = found
    shadow = on_meta(model)
    counter = MacCounter()
    for name, module in shadow.get_submodule(path).named_modules():
        if re.fullmatch(r"stem|coscale|stages\.\d+", name):
            module.register_forward_pre_hook(counter.enter(name))
            module.register_forward_hook(counter.leave)
    image = torch.empty(1, backbone.config.in_channels, height, width, device="meta")
    with counter, torch.no_grad():
        shadow(image)
    return counter.counts


def on_meta(model: nn.Module) -> nn.Module:
    """A float32 copy in eval mode without data and without anybody's hooks: shapes only, so nothing is computed."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to("meta")
    shadow = copy.deepcopy(model, memo).float().eval()
    for module in shadow.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return shadow


class MacCounter(TorchDispatchMode):
    """Adds up the operators that run under it, for the part that is being computed."""

    def __init__(self) -> None:
        super().__init__()
        self.part = "head"
        self.counts: dict[str, int] = {}

    def enter(self, part: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            self.part = part

        return hook

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.part = "head"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.counts[self.part] = self.counts.get(self.part, 0) + operator_macs(func, args, kwargs or {}, out)
        return out


def operator_macs(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """The count of one operator call."""
    packet = func.overloadpacket
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out)) // 2
    if packet in PER_OUTPUT_ELEMENT:
        first: Tensor = out[0] if isinstance(out, tuple) else out
        return PER_OUTPUT_ELEMENT[packet] * first.numel()
    if packet in FOURIER:  # a logarithm of the transformed sizes per output element; half spectra have the full size
        sizes = [max(args[0].shape[axis], out.shape[axis]) for axis in args[1]]
        return round(out.numel() * math.log2(math.prod(sizes)))
    if packet in FREE or func.is_view or is_elementwise(func):
        return 0
    raise MacsError(
        f"The multiply-accumulates of {func} are not known, and they are not guessed. "
        f"Add its formula to mixlab/metrics/macs.py."
    )


def is_elementwise(func: Any) -> bool:
    """PyTorch tags elementwise operators, but not always their in-place forms."""
    twin = getattr(getattr(aten, func._opname.removesuffix("_"), None), func._overloadname, func)
    return torch.Tag.pointwise in func.tags or torch.Tag.pointwise in twin.tags
