"""The channel MLP on (..., C): both layers and what is between them."""

from torch import Tensor

from mixlab.ops.activations import ActivationName
from mixlab.ops.linear import linear, linear_reference
from mixlab.ops.operator import Operator


def mlp_reference(
    x: Tensor,
    first: Tensor,
    inner_bias: Tensor | None,
    second: Tensor,
    bias: Tensor | None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    activation: ActivationName = "gelu",
) -> Tensor:
    """Linear, activation, linear; `scale` and `shift` are StarReLU's."""
    return linear_reference(linear_reference(x, first, inner_bias, scale, shift, activation), second, bias)


def layer_by_layer(
    x: Tensor,
    first: Tensor,
    inner_bias: Tensor | None,
    second: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    activation: ActivationName,
) -> Tensor:
    """The same, a layer at a time."""
    return linear(linear(x, first, inner_bias, activation, scale, shift), second, bias)


MLP = Operator(
    "mlp",
    layer_by_layer,
    inputs=("Tensor x, Tensor first, Tensor? inner_bias, Tensor second, Tensor? bias, Tensor? scale, Tensor? shift"),
    settings="str activation",
    packed=True,
)


def mlp(
    x: Tensor,
    first: Tensor,
    inner_bias: Tensor | None,
    second: Tensor,
    bias: Tensor | None,
    activation: ActivationName,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> Tensor:
    """`mlp_reference` by the fastest backend that serves. Weights are (hidden, C) and (out, hidden)."""
    return MLP(x, first, inner_bias, second, bias, scale, shift, activation)


def folded(second: Tensor, bias: Tensor | None, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """StarReLU's scale and shift as a part of the layer after it: W (s r^2 + b) = (s W) r^2 + b W 1."""
    summand = shift * second.sum(1)
    return second * scale, summand if bias is None else summand + bias
