"""Fewer steps with the same result: factors move into the linear layers behind which they stand."""

from collections import Counter

import torch
from torch import Tensor, nn

from mixlab.core.compat import has_onednn_products, listened_to
from mixlab.engine.serve import freeze, packed_weights, thaw
from mixlab.models.coscale import CoscaleBlock
from mixlab.models.layers import Mlp, Residual, Scaling, SquaredReLU, StarReLU
from mixlab.models.mixers import Mixer
from mixlab.ops.layers import PackedLinear, bare
from mixlab.ops.mlp import folded
from mixlab.ops.operator import is_plain


@torch.no_grad()
def fold(model: nn.Module) -> list[str]:
    """Fold what can be folded exactly but for rounding, in place; says what was done."""
    activations = sum(fold_star_relu(mlp) for mlp in model.modules() if type(mlp) is Mlp)
    residuals = [module for module in model.modules() if isinstance(module, Residual)]
    uses = Counter(id(branch.mixer) for residual in residuals for branch in residual.branches)
    exchanging = {id(one) for block in model.modules() if isinstance(block, CoscaleBlock) for one in block.token}
    scalings = sum(fold_branch_scale(one, uses) for one in residuals if id(one) not in exchanging)
    said = []
    if activations:
        said.append(f"scale and bias of {activations} StarReLUs moved into the linear layers behind them")
    if scalings:
        said.append(f"{scalings} branch scales moved into the linear layers in front of them")
    return said


def fold_star_relu(mlp: Mlp) -> bool:
    """W (s r^2 + b) + c = (s W) r^2 + (b W 1 + c)"""
    act = mlp.act
    if not bare(act, StarReLU) or not bare(mlp.fc2, nn.Linear, PackedLinear):
        return False
    assert isinstance(act, StarReLU)
    weight, bias = folded(mlp.fc2.weight, mlp.fc2.bias, act.scale, act.bias)
    mlp.fc2.weight = nn.Parameter(weight, requires_grad=False)
    mlp.fc2.bias = nn.Parameter(bias, requires_grad=False)
    mlp.act = SquaredReLU().to(weight.device).eval()
    return True


def fold_branch_scale(residual: Residual, uses: Counter[int]) -> bool:
    """t + f * (W x + c) = t + (f W) x + f c, in the last layer of every branch that is this residual's own."""
    if type(residual.scaling) is not Scaling:  # a class made from it may compute something else
        return False
    factor, mixers = residual.scaling.branch, [branch.mixer for branch in residual.branches]
    listened = [*residual.branches, *(mixer for mixer in mixers if isinstance(mixer, nn.Module)), residual.scaling]
    if factor is None or any(listened_to(module) for module in listened):
        return False
    lasts = [last_layer(mixer) for mixer in mixers if uses[id(mixer)] == 1]
    if len(lasts) < len(mixers) or not all(bare(last, nn.Linear, PackedLinear) for last in lasts):
        return False
    for last in lasts:
        assert last is not None
        last.weight = nn.Parameter(last.weight * factor[:, None], requires_grad=False)
        last.bias = None if last.bias is None else nn.Parameter(last.bias * factor, requires_grad=False)
    left = Scaling(len(factor))
    left.residual = residual.scaling.residual
    residual.scaling = left.eval()
    return True


def last_layer(mixer: object) -> nn.Linear | None:
    """The linear layer that a branch ends with."""
    if isinstance(mixer, Mlp):
        return mixer.fc2
    return mixer.last_layer if isinstance(mixer, Mixer) else None


def keep_packed(model: nn.Module, example: Tensor) -> int:
    """Let the engine pack the weights of a model once, as products read them: how many these are for images like the
    example. Later changes of the weights are not seen.
    """
    freeze(model)
    with torch.inference_mode(), torch.autocast(example.device.type, enabled=False):
        model(example)
    count = packed_weights(model)
    if not count:
        thaw(model)
    return count


def pack(model: nn.Module) -> int:
    """Linear layers that mixers and MLPs only call, with packed weights in place of parameters; how many there are."""
    callers = (
        [module for module in model.modules() if isinstance(module, (Mixer, Mlp))]
        if has_onednn_products() and torch.backends.mkldnn.enabled
        else []
    )
    found = [(module, name) for module in callers for name in module.linears]
    fitting = [(module, name) for module, name in found if can_pack(getattr(module, name))]
    for module, name in fitting:
        setattr(module, name, PackedLinear(getattr(module, name)))
    return len(fitting)


def can_pack(layer: nn.Module | None) -> bool:
    return isinstance(layer, nn.Linear) and bare(layer, nn.Linear) and is_plain(layer.weight)
