import pytest
import torch

from mixlab.core.errors import ConfigError
from mixlab.core.grid import Grid
from mixlab.models.mixers import MIXERS
from tests.models.mixers.contract import MixerContract


class TestPool(MixerContract):
    name = "pool"

    def test_is_the_mean_of_neighbours_inside_the_image_minus_the_token(self) -> None:
        image = torch.randn(4, 3, self.dim)  # (H, W, C)
        out = self.mixer()(image.reshape(1, 12, self.dim), Grid(4, 3)).reshape(4, 3, self.dim)
        corner = image[:2, :2].mean((0, 1)) - image[0, 0]
        centre = image[0:3, 0:3].mean((0, 1)) - image[1, 1]
        torch.testing.assert_close(out[0, 0], corner)
        torch.testing.assert_close(out[1, 1], centre)


class TestWidePool(MixerContract):
    name = "pool"
    options = {"size": 5}


def test_an_even_window_is_an_error() -> None:
    with pytest.raises(ConfigError, match="odd size"):
        MIXERS.parse({"name": "pool", "size": 2})
