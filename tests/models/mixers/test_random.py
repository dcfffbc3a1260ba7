import pytest
import torch

from mixlab.core.errors import ImageError, WeightsError
from mixlab.core.grid import Grid
from mixlab.models.mixers.random import RandomMixing
from tests.models.mixers.contract import REFERENCE, MixerContract


class TestRandom(MixerContract):
    name = "random"

    def test_the_matrix_is_frozen_and_its_rows_sum_to_one(self) -> None:
        mixer = self.mixer()
        (matrix,) = mixer.parameters()
        assert not matrix.requires_grad
        torch.testing.assert_close(matrix.sum(1), torch.ones(30))

    def test_another_grid_uses_a_resampled_matrix_whose_rows_sum_to_one(self) -> None:
        grid = Grid(4, 9)
        matrix = self.mixer().explain(self.tokens(grid), grid)["matrix"]
        assert matrix.shape == (36, 36)
        torch.testing.assert_close(matrix.sum(1), torch.ones(36))

    def test_a_constant_image_stays_constant_at_any_size(self) -> None:
        out = self.mixer()(torch.ones(1, 77, self.dim), Grid(7, 11))
        torch.testing.assert_close(out, torch.ones(1, 77, self.dim))


def test_more_than_4096_tokens_are_an_error() -> None:
    with pytest.raises(ImageError, match="4225 tokens"):
        RandomMixing(Grid(65, 65))
    with pytest.raises(ImageError, match="4225 tokens"):
        RandomMixing(REFERENCE)(torch.randn(1, 65 * 65, 4), Grid(65, 65))


def test_a_matrix_of_unknown_shape_is_an_error() -> None:
    with pytest.raises(WeightsError, match="square"):
        RandomMixing(Grid(4, 4)).resize("matrix", torch.rand(12, 12), None)
