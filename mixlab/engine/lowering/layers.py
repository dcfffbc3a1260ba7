"""Norms, activations, the channel MLP and the residual sum."""

from torch import Tensor, nn

from mixlab.engine.draft import Draft, Tokens
from mixlab.engine.kernels.linear import AS_IT_IS, Then
from mixlab.engine.kernels.norm import Norm
from mixlab.engine.lowering.base import lower, lowers
from mixlab.engine.steps import Pending, Place, Sum
from mixlab.models.layers import GELU, Branch, Mlp, ReLU, Residual, Scaling, SquaredReLU, StarReLU
from mixlab.models.modules import Shared

PLAIN = {ReLU: "relu", GELU: "gelu", SquaredReLU: "squared_relu"}
FEWEST = 4  # rows from which the kernels' products are as fast as others


def activation(draft: Draft, act: nn.Module) -> tuple[str, Then]:
    """What a linear layer does in the same pass: the name, and a factor and a summand after a squared ReLU."""
    draft.exactly(act, *PLAIN, StarReLU)
    if isinstance(act, StarReLU):
        return "squared_relu", (draft.number(act.scale), draft.number(act.bias))
    return PLAIN[type(act)], AS_IT_IS  # type: ignore[index]


def layer_norm(draft: Draft, norm: nn.Module, channels: int) -> Norm:
    """A layer norm over so many channels."""
    draft.exactly(norm, nn.LayerNorm)
    assert isinstance(norm, nn.LayerNorm)
    draft.require(norm.normalized_shape == (channels,), "a norm is over other axes")
    draft.require(norm.weight is not None, "a norm has no weight")
    bias = norm.bias
    return Norm(draft.tensor(norm.weight, channels), None if bias is None else draft.tensor(bias, channels), norm.eps)


def normed(draft: Draft, norm: nn.Module, tokens: Tokens) -> Place | Pending:
    """Tokens after a norm: by PyTorch, if it is another one than a layer norm."""
    if type(norm) is nn.Identity:
        draft.watch(norm)
        return tokens.place
    if type(norm) is nn.LayerNorm and norm.normalized_shape == (tokens.channels,) and norm.weight is not None:
        return draft.norm(layer_norm(draft, norm, tokens.channels), tokens.place, tokens.rows)
    draft.pytorch(draft.path(norm), f"{type(norm).__name__} is not known to the engine")
    return draft.call(norm, tokens.shape, (tokens.place, tokens.shape))


def factors(draft: Draft, scaling: nn.Module, channels: int) -> tuple[Tensor | None, Tensor | None]:
    """The factors of the stream and of the branch in a residual sum."""
    draft.exactly(scaling, Scaling)
    assert isinstance(scaling, Scaling)
    residual, branch = scaling.residual, scaling.branch
    return (
        None if residual is None else draft.tensor(residual, channels),
        None if branch is None else draft.tensor(branch, channels),
    )


def branch(draft: Draft, part: nn.Module, tokens: Tokens, onto: Sum | None) -> Place:
    """A norm and the mixer after it."""
    draft.exactly(part, Branch)
    assert isinstance(part, Branch)
    mixer = draft.shared(part.mixer) if isinstance(part.mixer, Shared) else part.mixer
    return lower(draft, mixer, normed(draft, part.norm, tokens), tokens, onto)


def check_residual(draft: Draft, module: Residual, tokens: Tokens) -> None:
    draft.exactly(module, Residual)
    draft.require(not module.training, "a residual sum is in training mode")
    draft.require(tokens.rows >= FEWEST, f"there are fewer than {FEWEST} rows")
    draft.watch(module.branches)


def update_of(draft: Draft, module: Residual, tokens: Tokens) -> Place:
    """The output of the only branch of a residual sum, before the sum."""
    check_residual(draft, module, tokens)
    draft.require(len(module.branches) == 1, "there are several branches")
    return branch(draft, module.branches[0], tokens, None)


def residual(draft: Draft, module: Residual, tokens: Tokens) -> Place:
    """Tokens plus the sum of the branches, which all read these tokens."""
    check_residual(draft, module, tokens)
    first, update = factors(draft, module.scaling, tokens.channels)
    stream = tokens.place
    for index, part in enumerate(module.branches):
        stream = branch(draft, part, tokens, Sum(stream, None if index else first, update))
    return stream


@lowers(Mlp)
def mlp(draft: Draft, module: Mlp, x: Place | Pending, tokens: Tokens, onto: Sum | None) -> Place:
    after, then = activation(draft, module.act)
    first = draft.linear_weights(module.fc1, tokens.channels)
    second = draft.linear_weights(module.fc2, len(first[0]), tokens.channels)
    return draft.mlp(first, second, x, tokens.rows, after, then, onto)
