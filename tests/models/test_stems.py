import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mixlab.core.grid import Grid
from mixlab.models.stems import STEMS, Downsample, stem

ENTRIES = [
    {"name": "overlapping", "kernel": 7, "stride": 4, "padding": 2, "norm": "after"},
    {"name": "overlapping"},
    {"name": "overlapping", "kernel": 2, "stride": 2, "padding": 1},
    {"name": "patchify", "patch": 7},
    {"name": "patchify", "patch": 4, "norm": "after"},
    {"name": "convolutional", "widths": [4, 6], "kernels": [7, 3, 3], "activation": "relu"},
]


@pytest.mark.parametrize("entry", ENTRIES)
@settings(max_examples=25, deadline=None)
@given(height=st.integers(8, 70), width=st.integers(8, 70))
def test_the_grid_is_known_before_any_image(entry: dict[str, object], height: int, width: int) -> None:
    layer = stem(STEMS.parse(entry), 3, 8)
    tokens, grid = layer(torch.randn(1, 3, height, width))
    assert grid == layer.grid_after(Grid(height, width))
    assert tokens.shape == (1, grid.tokens, 8)


def test_patches_are_padded_with_zeros_right_and_bottom() -> None:
    layer, image = stem(STEMS.parse({"name": "patchify", "patch": 4}), 3, 8), torch.randn(1, 3, 10, 9)
    padded = torch.zeros(1, 3, 12, 12)
    padded[:, :, :10, :9] = image
    tokens, grid = layer(image)
    assert grid == Grid(3, 3)
    assert torch.equal(tokens, layer(padded)[0])


def test_a_stem_is_its_convolution_and_a_norm_over_channels() -> None:
    layer, image = stem(STEMS.parse(ENTRIES[0]), 3, 8), torch.randn(2, 3, 33, 57)
    assert isinstance(layer, Downsample)
    assert layer.norm is not None
    expected = layer.norm(layer.conv(image).flatten(2).transpose(1, 2))
    torch.testing.assert_close(layer(image)[0], expected)


def test_strides_multiply_in_a_convolutional_stem() -> None:
    assert stem(STEMS.parse({"name": "convolutional", "activation": "relu"}), 3, 384).stride == 16
