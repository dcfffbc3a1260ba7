"""The parts of a block: activations, norms, the channel MLP, branch scaling and stochastic depth."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixlab.core.choices import Choice, Registry
from mixlab.core.grid import Grid
from mixlab.core.parts import Part, in_one
from mixlab.models.modules import Modules
from mixlab.ops.activations import ActivationName, squared_relu, star_relu
from mixlab.ops.layers import DepthwiseConv as DepthwiseConv
from mixlab.ops.layers import normed, through_mlp
from mixlab.ops.norms import global_norm

ACTIVATIONS: Registry[Callable[..., "Activation"]] = Registry("activation")
NORMS: Registry[Callable[..., nn.Module]] = Registry("norm")
SCALINGS: Registry[Callable[..., "Scaling"]] = Registry("branch scaling")

ActivationChoice = Annotated[Choice, ACTIVATIONS]
NormChoice = Annotated[Choice, NORMS]
ScalingChoice = Annotated[Choice, SCALINGS]


# -- activations ---------------------------------------------------------------------------------


class Activation(nn.Module):
    """An elementwise function. `operation` is its name in `mixlab.ops.activations`, which may compute it together with
    the linear layers around it; a class with a forward of its own and without a name is only called.
    """

    operation: ActivationName | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "forward" in vars(cls) and "operation" not in vars(cls):
            cls.operation = None

    def factors(self) -> tuple[Tensor | None, Tensor | None]:
        """StarReLU's scale and bias."""
        return None, None


@ACTIVATIONS.register("relu")
class ReLU(Activation):
    operation = "relu"

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x)


@ACTIVATIONS.register("gelu")
class GELU(Activation):
    operation = "gelu"

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x)


@ACTIVATIONS.register("squared_relu")
class SquaredReLU(Activation):
    operation = "squared_relu"

    def forward(self, x: Tensor) -> Tensor:
        return squared_relu(x).to(x.dtype)


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

    operation = "star_relu"

    def __init__(self, scale: float, bias: float, learn_scale: bool, learn_bias: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), scale), requires_grad=learn_scale)
        self.bias = nn.Parameter(torch.full((1,), bias), requires_grad=learn_bias)

    def factors(self) -> tuple[Tensor | None, Tensor | None]:
        return self.scale, self.bias

    def forward(self, x: Tensor) -> Tensor:
        return star_relu(x, self.scale, self.bias)


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
        return through_mlp(self.fc1, self.act, self.fc2, tokens)


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
