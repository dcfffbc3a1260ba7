"""A long convolution with constants in it equals the layer that it was made from."""

import pytest
import torch

import mixlab
from mixlab.core.grid import Grid
from mixlab.models.fixed_filter import FixedConv
from mixlab.models.mixers.hyena import LongConv


@pytest.mark.parametrize("mixer", ["hyena", "hyena_bidirectional", "hyena_pixel"])
@pytest.mark.parametrize("grid", [Grid(4, 4), Grid(9, 7), Grid(28, 30)])
def test_it_gives_what_the_layer_gives(mixer: str, grid: Grid) -> None:
    model = mixlab.create_model("hpx_former_pico", dims=[8] * 4, depths=[1] * 4, mixers=mixer).eval()
    layer = next(module for module in model.modules() if isinstance(module, LongConv))
    tokens = torch.randn(2, grid.image_tokens, 8)
    with torch.no_grad():
        fixed = layer.fixed(grid)
        torch.testing.assert_close(fixed(tokens, grid), layer(tokens, grid), atol=1e-5, rtol=1e-4)
    assert isinstance(fixed, FixedConv)
    assert not fixed.kernel.is_complex()
    assert not list(fixed.parameters())
