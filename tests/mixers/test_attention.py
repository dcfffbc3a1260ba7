import pytest
import torch

from mixlab.errors import ConfigError
from mixlab.grid import Grid
from mixlab.mixers import MIXERS, heads_for
from tests.mixers.contract import MixerContract


class TestAttention(MixerContract):
    name = "attention"
    options = {"head_dim": 8}
    spatial = False

    def test_the_weights_it_shows_are_a_distribution_over_keys(self) -> None:
        attention = self.mixer().explain(torch.randn(2, 30, self.dim), Grid(6, 5))["attention"]
        assert attention.shape == (2, 4, 30, 30)
        torch.testing.assert_close(attention.sum(-1), torch.ones(2, 4, 30))


class TestWindowAttention(MixerContract):
    name = "window_attention"
    options = {"head_dim": 8, "window": 3}
    spatial = False

    def test_a_token_outside_the_window_changes_nothing(self) -> None:
        grid, mixer = Grid(6, 5), self.mixer()
        tokens = torch.randn(1, 30, self.dim)
        changed = tokens.clone()
        changed[0, -1] += 1  # bottom right
        moved = (mixer(tokens, grid) - mixer(changed, grid)).abs().sum(-1)[0].reshape(6, 5)
        assert (moved[:4] < 1e-5).all()
        assert (moved[:, :3] < 1e-5).all()
        assert (moved[4:, 3:] > 1e-3).all()

    def test_weights_of_plain_attention_fit_it(self) -> None:
        choice = MIXERS.parse("attention")
        plain = MIXERS.builder(choice)(choice.options, self.dim, 1, Grid(6, 5)).blocks[0].branches[0]
        self.mixer().load_state_dict(plain.state_dict())
        assert list(plain.state_dict()) == ["qkv.weight", "project.weight"]


@pytest.mark.parametrize(
    ("dim", "head_dim", "heads"), [(320, 32, 10), (63, 32, 1), (96, 64, 1), (60, 32, 1), (130, 32, 2), (7, 32, 1)]
)
def test_head_counts_divide_the_width_and_keep_the_head_size(dim: int, head_dim: int, heads: int) -> None:
    assert heads_for(dim, head_dim) == heads


def test_an_even_window_is_an_error() -> None:
    with pytest.raises(ConfigError, match="odd size"):
        MIXERS.parse({"name": "window_attention", "window": 8})
