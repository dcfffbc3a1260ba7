"""Inverted separable convolution (MetaFormer, Eq. 6)."""

from dataclasses import dataclass

from torch import Tensor, nn

from mixlab.core.errors import ConfigError, require
from mixlab.core.grid import Grid
from mixlab.models.layers import Activation, ActivationChoice, DepthwiseConv, activation
from mixlab.models.mixers.base import MIXERS, Mixer, StageParts
from mixlab.ops.layers import through, through_both


@dataclass(frozen=True)
class SepConvOptions:
    """`activation` and `bias` are the model's own unless given."""

    expansion: float = 2.0
    kernel: int = 7
    activation: ActivationChoice | None = None
    bias: bool | None = None

    def __post_init__(self) -> None:
        require(0 < self.expansion < 1000, f"an expansion above 0; got {self.expansion}.")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ConfigError(f"A separable convolution has an odd kernel of 1 or more; got {self.kernel}.")


class SepConv(Mixer):
    """Widen each token, activation, depthwise convolution over the grid, narrow each token."""

    outruns_compilers = True
    explains = ("kernels",)
    linears = ("widen", "narrow")

    def __init__(self, dim: int, hidden: int, kernel: int, act: Activation, *, bias: bool) -> None:
        super().__init__()
        self.widen = nn.Linear(dim, hidden, bias=bias)
        self.act = act
        self.depthwise = DepthwiseConv(hidden, kernel, bias=bias)
        self.narrow = nn.Linear(hidden, dim, bias=bias)

    @property
    def last_layer(self) -> nn.Linear:
        return self.narrow

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        hidden = through_both(self.widen, self.act, tokens)
        hidden = grid.from_map(self.depthwise(grid.to_map(hidden)))
        return grid.behind_zeros(through(self.narrow, hidden))

    def explain(self, tokens: Tensor, grid: Grid) -> dict[str, Tensor]:
        return {"kernels": self.depthwise.weight.detach().squeeze(1).clone()}  # (hidden, kernel, kernel)

    def kernel_sources(self) -> tuple[nn.Module, ...]:
        return (self.depthwise,)


@MIXERS.register("sepconv", SepConvOptions)
def build_stage(options: SepConvOptions, dim: int, depth: int, reference_grid: Grid) -> StageParts:
    hidden = max(1, int(options.expansion * dim))
    assert options.activation is not None, "the model's own is filled in by now"
    return StageParts.of(
        SepConv(dim, hidden, options.kernel, activation(options.activation), bias=bool(options.bias))
        for _ in range(depth)
    )
