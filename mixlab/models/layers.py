"""The parts of a block: activations, norms, the channel MLP, branch scaling and stochastic depth."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from mixlab.core.choices import Choice, Registry
from mixlab.core.grid import Grid
from mixlab.core.parts import Part, in_one
from mixlab.engine.kernels import may_run
from mixlab.engine.kernels.linear import AS_IT_IS, Then, run_mlp
from mixlab.engine.kernels.norm import Norm, fits, norm_of_product
from mixlab.models.modules import Modules
from mixlab.ops.activations import (
    linear_star_relu,
    may_join_star,
    squared_relu,
    star_relu,
    star_relu_linear,
)
from mixlab.ops.depthwise import depthwise
from mixlab.ops.linear import (
    TWO,
    After,
    is_fast,
    is_own_product,
    is_plain_float,
    linear,
    needs_gradient,
    product,
    rows_in_cache,
)
from mixlab.ops.mlp import Inner, mlp
from mixlab.ops.norms import global_norm

ACTIVATIONS: Registry[Callable[..., "Activation"]] = Registry("activation")
NORMS: Registry[Callable[..., nn.Module]] = Registry("norm")
SCALINGS: Registry[Callable[..., "Scaling"]] = Registry("branch scaling")

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

ActivationChoice = Annotated[Choice, ACTIVATIONS]
Folded = tuple[Callable[[Tensor], Tensor] | None, Tensor, Tensor | None]
NormChoice = Annotated[Choice, NORMS]
ScalingChoice = Annotated[Choice, SCALINGS]


# -- linear layers -------------------------------------------------------------------------------


def through(layer: nn.Linear, x: Tensor) -> Tensor:
    """layer(x) by the fastest way."""
    return linear(x, *weights_of(layer)) if is_own(layer) else layer(x)


def weights_of(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight and bias, looked up where they lie unless something stands for them."""
    own = layer._parameters
    if "weight" in own and "bias" in own and own["weight"] is not None:
        return own["weight"], own["bias"]
    return layer.weight, layer.bias  # type: ignore[return-value]


def is_own(layer: nn.Module) -> bool:
    """Whether a linear layer is nothing else, so that its arithmetic may be done elsewhere."""
    return type(layer) in (nn.Linear, PackedLinear) and is_plain(layer)


class PackedLinear(nn.Linear):
    """A linear layer for inference, its weight in the order in which oneDNN reads it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        del self.weight
        self.weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().contiguous(), None)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def is_plain(module: nn.Module) -> bool:
    """Whether nobody listens to or changes a module's call: hooks, pruning, another forward."""
    own = module.__dict__
    if _has_any_global_hook() or any(own[name] for name in HOOKS):
        return False
    return "forward" not in own and own.get("_compiled_call_impl") is None


def linear_for_fusion(layer: nn.Linear, x: Tensor) -> Tensor:
    """layer(x) in front of elementwise work: compiled, the bias is left to that, which takes 8% off the product."""
    if torch.compiler.is_compiling() and layer.bias is not None and is_own(layer):
        alone = F.linear(x, layer.weight)
        return alone + layer.bias.to(alone.dtype)
    return through(layer, x)


# -- activations ---------------------------------------------------------------------------------


class Activation(nn.Module):
    """An elementwise function that knows the cheapest ways out of a linear layer in front and into one behind.

    It is what a linear layer does in the same pass (`after` and `then`), then `finish` unless that is `complete`. A
    class with a forward of its own and without one of these does not inherit it.
    """

    after: After = "none"
    complete: bool = False
    inner: Inner | None = None  # what is left of it between two layers when `folded`, for the gradient of them all

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "forward" in vars(cls):
            for name in ("after", "then", "complete", "inner", "finish", "behind", "folded", "fused_into"):
                if name not in vars(cls):
                    setattr(cls, name, vars(Activation)[name])

    def then(self) -> Then:
        """A factor and a summand behind a squared ReLU."""
        return AS_IT_IS

    def finish(self, x: Tensor) -> Tensor:
        """What is left to do behind these, in the memory of x."""
        return x.copy_(self(x))

    def behind(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """self(layer(x))"""
        if self.is_fast() and is_own(layer) and not torch.is_grad_enabled() and is_fast(x, layer.weight, layer.bias):
            found = product(x, layer.weight, layer.bias, self.after, self.then())
            return found if self.complete else self.finish(found)
        return self(through(layer, x))

    def is_fast(self) -> bool:
        """Whether its parts may be computed in place of itself."""
        own = self.parameters() if self._modules else self._parameters.values()
        return is_plain(self) and all(one is None or is_plain_float(one) for one in own)

    def folded(self, behind: nn.Linear) -> Folded:
        """What is left to do behind `after` and not `then`, and weight and bias of the layer behind, to which a part of
        the activation may have moved.
        """
        return None if self.complete else self.finish, behind.weight, behind.bias

    def into(self, x: Tensor, layer: nn.Linear, *, own: bool) -> Tensor:
        """layer(self(x)). `own` allows x to be overwritten, which happens when no gradient is recorded."""
        if is_plain(self) and is_own(layer):
            return self.fused_into(x, layer, overwrite=own and not torch.is_grad_enabled())
        return layer(self(x))

    def fused_into(self, x: Tensor, layer: nn.Linear, *, overwrite: bool) -> Tensor:
        return through(layer, self(x))


class DepthwiseConv(nn.Conv2d):
    """One odd kernel per channel; the map keeps its size."""

    def __init__(self, channels: int, kernel: int | tuple[int, int], *, bias: bool) -> None:
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (height // 2, width // 2)
        super().__init__(channels, channels, (height, width), padding=padding, groups=channels, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        height, width = self.kernel_size
        return depthwise(x, self.weight, self.bias, (height // 2, width // 2))


def is_depthwise(conv: nn.Module) -> bool:
    """Whether a convolution moves one kernel over every channel, pixel by pixel, and does nothing else."""
    if type(conv) not in (nn.Conv2d, DepthwiseConv) or not is_plain(conv):
        return False
    usual = conv.stride == conv.dilation == (1, 1) and conv.padding_mode == "zeros"
    return usual and conv.groups == conv.in_channels == conv.out_channels


@ACTIVATIONS.register("relu")
class ReLU(Activation):
    after = inner = "relu"
    complete = True

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x)

    def fused_into(self, x: Tensor, layer: nn.Linear, *, overwrite: bool) -> Tensor:
        return through(layer, x.relu_() if overwrite else F.relu(x))


@ACTIVATIONS.register("gelu")
class GELU(Activation):
    after = inner = "gelu"
    complete = True

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x)

    def fused_into(self, x: Tensor, layer: nn.Linear, *, overwrite: bool) -> Tensor:
        return through(layer, torch.ops.aten.gelu_(x) if overwrite else F.gelu(x))


@ACTIVATIONS.register("squared_relu")
class SquaredReLU(Activation):
    after = inner = "squared_relu"
    complete = True

    def forward(self, x: Tensor) -> Tensor:
        return squared_relu(x).to(x.dtype)

    def fused_into(self, x: Tensor, layer: nn.Linear, *, overwrite: bool) -> Tensor:
        return through(layer, squared_relu(x, overwrite=overwrite).to(x.dtype))


@dataclass(frozen=True)
class StarReLUOptions:
    """Start values and what is learned. The paper's derivation (Eq. 14) gives 0.8944 and -0.4472."""

    scale: float = 1.0
    bias: float = 0.0
    learn_scale: bool = True
    learn_bias: bool = True


@ACTIVATIONS.register("star_relu", StarReLUOptions)
class StarReLU(Activation):
    """scale * relu(x)^2 + bias, both shared by all channels (MetaFormer, Eq. 15)."""

    after = inner = "squared_relu"
    complete = True

    def __init__(self, scale: float, bias: float, learn_scale: bool, learn_bias: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), scale), requires_grad=learn_scale)
        self.bias = nn.Parameter(torch.full((1,), bias), requires_grad=learn_bias)

    def forward(self, x: Tensor) -> Tensor:
        return star_relu(x, self.scale, self.bias)

    def then(self) -> Then:
        return self.scale.item(), self.bias.item()

    def behind(self, layer: nn.Linear, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and is_plain(self) and is_own(layer):
            both = (x, *weights_of(layer), self.scale, self.bias)
            if may_join_star(*both):
                return linear_star_relu(*both)
        return super().behind(layer, x)

    def folded(self, behind: nn.Linear) -> "Folded":
        shift = self.bias * behind.weight.sum(1)  # W (s r^2 + b) = (s W) r^2 + b W 1
        return None, behind.weight * self.scale, shift if behind.bias is None else shift + behind.bias

    def fused_into(self, x: Tensor, layer: nn.Linear, *, overwrite: bool) -> Tensor:
        return star_relu_linear(x, self.scale, self.bias, layer.weight, layer.bias, overwrite=overwrite)


def activation(choice: Choice) -> Activation:
    return ACTIVATIONS.builder(choice)(**vars(choice.options))


# -- norms ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NormOptions:
    eps: float = 1e-6


@NORMS.register("layer", NormOptions)
def layer_norm(dim: int, bias: bool, eps: float) -> nn.Module:
    """Over the channels of each token."""
    return nn.LayerNorm(dim, eps=eps, bias=bias)


@NORMS.register("global", NormOptions)
class GlobalNorm(nn.Module):
    """Over all tokens and channels of an image together (PoolFormer's "modified layer norm")."""

    def __init__(self, dim: int, bias: bool, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None

    def forward(self, tokens: Tensor) -> Tensor:
        return global_norm(tokens, self.weight, self.bias, self.eps)


def norm(choice: Choice, dim: int, *, bias: bool) -> nn.Module:
    return NORMS.builder(choice)(dim, bias, **vars(choice.options))


def known_norm(norm: nn.Module) -> Norm | None:
    """What a kernel has to know to do a norm's work; None if it cannot."""
    if type(norm) is nn.Identity and is_plain(norm):
        return Norm(None, None, 0.0)
    if type(norm) is not nn.LayerNorm or len(norm.normalized_shape) > 1 or not is_plain(norm):
        return None
    weight, bias = weights_of(norm)
    plain = weight is not None and weight.is_contiguous() and (bias is None or bias.is_contiguous())
    return Norm(weight, bias, norm.eps) if plain else None


def normed(norm: nn.Module, one: Tensor, other: Tensor | None = None) -> Tensor:
    """norm(one) or norm(one * other) of (B, ..., C)."""
    given, known = [one] if other is None else [one, other], known_norm(norm) if one.ndim > 2 else None
    if known is not None and (known.weight is not None or other is not None) and may_run(*given, *known[:2]):
        parts = [part.flatten(1, -2) for part in given]
        if fits(*parts) and all(part is None or part.shape == one.shape[-1:] for part in known[:2]):
            return norm_of_product(parts[0], parts[1] if other is not None else None, known).view(one.shape)
    return norm(one if other is None else one * other)


# -- the channel MLP -----------------------------------------------------------------------------


class Mlp(Part):
    """Linear, activation, linear on each token (MetaFormer, Eq. 3)."""

    def __init__(self, dim: int, hidden: int, act: Activation, *, bias: bool) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden, bias=bias)
        self.act = act
        self.fc2 = nn.Linear(hidden, dim, bias=bias)

    @property
    def linears(self) -> tuple[str, ...]:
        """The layers that are only called: an activation may read the weights of the one behind it."""
        return ("fc1",) if isinstance(self.act, StarReLU) else ("fc1", "fc2")

    @in_one
    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        if self.is_fast(tokens):
            if not torch.is_grad_enabled():
                return self.by_rows(tokens)
            if self.act.inner and self.is_large(tokens) and needs_gradient(tokens, *self.parameters()):
                _, weight, bias = self.act.folded(self.fc2)
                return mlp(tokens, self.fc1.weight, self.fc1.bias, weight, bias, inner=self.act.inner)
        return self.act.into(through(self.fc1, tokens), self.fc2, own=is_plain(self.fc1))

    def is_fast(self, tokens: Tensor) -> bool:
        if not (is_own(self.fc1) and is_own(self.fc2)):
            return False
        (first, inner_bias), (weight, bias) = weights_of(self.fc1), weights_of(self.fc2)
        fits = weight.ndim == 2 and weight.shape[1] == len(first) and is_plain_float(weight)
        fits = fits and (bias is None or (is_plain_float(bias) and bias.shape == weight.shape[:1]))
        return fits and self.act.is_fast() and is_fast(tokens, first, inner_bias)

    def is_large(self, tokens: Tensor) -> bool:
        """Whether there are more activations than weights."""
        return tokens.numel() > 2 * tokens.shape[-1] ** 2

    def may_join(self, tokens: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether our own kernel may compute both layers together, the second with these weights."""
        first = self.fc1.weight
        plain = first.is_contiguous() and weight.is_contiguous() and not weight.is_mkldnn
        return plain and is_own_product(tokens, first, self.fc1.bias) and (bias is None or bias.is_contiguous())

    def by_rows(self, tokens: Tensor) -> Tensor:
        """As many tokens at a time as keep the wide layer in the cache."""
        rows = tokens.reshape(-1, tokens.shape[-1])
        step = rows_in_cache(len(rows), self.fc1.out_features)
        (first, inner_bias), (weight, bias), act = weights_of(self.fc1), weights_of(self.fc2), self.act
        then = act.then()
        if act.complete and len(rows) >= TWO and self.may_join(tokens, weight, bias):
            return run_mlp(tokens, first, inner_bias, weight, bias, act.after, then)

        def of(some: Tensor) -> Tensor:
            hidden = product(some, first, inner_bias, act.after, then)
            return product(hidden if act.complete else act.finish(hidden), weight, bias)

        if step == len(rows):
            return of(rows).unflatten(0, tokens.shape[:-1])
        out = rows.new_empty(len(rows), self.fc2.out_features)
        for place, some in zip(out.split(step), rows.split(step), strict=True):
            place.copy_(of(some))
        return out.unflatten(0, tokens.shape[:-1])


# -- the residual sum ----------------------------------------------------------------------------


class Scaling(nn.Module):
    """residual * tokens + branch * update, each factor a vector over channels or absent (Eqs. 16-18)."""

    def __init__(self, dim: int, residual: float | None = None, branch: float | None = None) -> None:
        super().__init__()
        self.residual = None if residual is None else nn.Parameter(torch.full((dim,), residual))
        self.branch = None if branch is None else nn.Parameter(torch.full((dim,), branch))

    def forward(self, tokens: Tensor, update: Tensor) -> Tensor:
        if self.branch is not None and self.residual is not None:
            return torch.addcmul(tokens * self.residual, update, self.branch)
        if self.branch is not None:
            return torch.addcmul(tokens, update, self.branch)
        if self.residual is not None:
            return torch.addcmul(update, tokens, self.residual)
        return tokens + update


@dataclass(frozen=True)
class LayerScaleOptions:
    branch: float = 1e-5


@dataclass(frozen=True)
class ResScaleOptions:
    residual: float = 1.0


@dataclass(frozen=True)
class BranchScaleOptions:
    residual: float = 1.0
    branch: float = 1e-5


SCALINGS.register("none")(Scaling)
SCALINGS.register("layer_scale", LayerScaleOptions)(Scaling)
SCALINGS.register("res_scale", ResScaleOptions)(Scaling)
SCALINGS.register("branch_scale", BranchScaleOptions)(Scaling)


@dataclass(frozen=True)
class StochasticDepth:
    """`ramp` rises linearly from 0 at the first block to `rate` at the last; `constant` is one rate.

    Form `mask` computes every sample and zeroes the dropped ones. `skip` computes only the kept ones: their share of
    the batch is the rate's, rounded up or down at random, and at least one, so that every parameter gets a gradient.
    Compiled code masks in both forms, because there a shape must not change from step to step.
    """

    rate: float = 0.0
    schedule: Literal["ramp", "constant"] = "ramp"
    form: Literal["mask", "skip"] = "mask"

    def rates(self, blocks: int) -> list[float]:
        if self.schedule == "constant":
            return [self.rate] * blocks
        return [self.rate * index / max(blocks - 1, 1) for index in range(blocks)]


class Branch(Part):
    """A norm and the mixer behind it."""

    calls = ("mixer",)

    def __init__(self, norm: nn.Module, mixer: Callable[[Tensor, Grid], Tensor]) -> None:
        super().__init__()
        self.norm = norm
        self.mixer = mixer

    @in_one
    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        return self.mixer(normed(self.norm, tokens), grid)


class Residual(nn.Module):
    """Tokens plus the sum of one or more branches, with branch scaling and stochastic depth."""

    keep: Tensor

    def __init__(self, branches: Iterable[Branch], scaling: Scaling, *, drop_rate: float, skip: bool) -> None:
        super().__init__()
        self.branches: Modules[Branch] = Modules(branches)
        self.scaling = scaling
        self.drops = drop_rate > 0
        self.drop_rate = drop_rate
        self.skips_dropped = skip
        # A tensor beside the float: blocks that differ only in their rate then share one compiled graph.
        self.register_buffer("keep", torch.tensor(1 - drop_rate), persistent=False)
        self.register_load_state_dict_post_hook(refill_keep)

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        if self.training and self.drops and self.skips_dropped and not torch.compiler.is_compiling():
            return self.forward_kept(tokens, grid)
        return self.merge(tokens, self.update(tokens, grid))

    def merge(self, tokens: Tensor, update: Tensor) -> Tensor:
        """The residual sum, with the updates of dropped samples masked."""
        if self.training and self.drops:
            mask = (torch.rand(len(tokens), 1, 1, device=tokens.device) < self.keep) / self.keep
            update = update * mask.to(update.dtype)
        return self.scaling(tokens, update)

    def update(self, tokens: Tensor, grid: Grid) -> Tensor:
        first, *others = self.branches
        total = first(tokens, grid)
        for branch in others:
            total = total + branch(tokens, grid)
        return total

    def forward_kept(self, tokens: Tensor, grid: Grid) -> Tensor:
        """Stochastic depth that does not compute what it drops (Vision-LSTM, B.2)."""
        batch = len(tokens)
        share = batch * (1 - self.drop_rate)
        kept = max(1, int(share) + (torch.rand(()).item() < share % 1))
        chosen = torch.randperm(batch, device=tokens.device)[:kept]
        update = self.update(tokens[chosen], grid) * (batch / kept)
        return self.scaling(tokens, torch.zeros_like(tokens).index_add(0, chosen, update.to(tokens.dtype)))


def refill_keep(module: nn.Module, keys: object) -> None:
    """A model that was built without memory gets its drop rates with its weights."""
    assert isinstance(module, Residual)
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    module.keep = torch.tensor(1 - module.drop_rate, device=device)
