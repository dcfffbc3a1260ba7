import pytest
import torch

import mixlab
from mixlab.core.errors import ConfigError
from mixlab.core.grid import Grid
from mixlab.models.mixers import MIXERS, heads_for
from mixlab.models.mixers.attention import RelativeBias
from tests.models.mixers.contract import MixerContract


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


class TestRelativeBias(MixerContract):
    name = "attention"
    options = {"relative_bias": True}
    spatial = False


def test_a_relative_bias_starts_at_zero_and_reads_the_offset() -> None:
    grid = Grid(3, 4, prefix=1)
    bias = RelativeBias(grid, heads=2)
    assert (bias(grid) == 0).all()
    with torch.no_grad():
        bias.table.copy_(torch.arange(35.0).reshape(5, 7).expand(2, 5, 7))
        assert bias.class_tokens is not None
        bias.class_tokens.copy_(torch.tensor([-1.0, -2.0, -3.0]).expand(2, 3))
    shown = bias(grid)
    assert shown.shape == (2, 13, 13)
    query, key = (2, 1), (0, 3)  # two rows down and two columns to the left
    assert shown[0, 1 + query[0] * 4 + query[1], 1 + key[0] * 4 + key[1]] == (2 + 2) * 7 + (-2 + 3)
    assert shown[0, 0].tolist() == [-3.0] + [-1.0] * 12
    assert shown[0, 1:, 0].tolist() == [-2.0] * 12


def test_a_relative_bias_is_resampled_with_the_image() -> None:
    model = mixlab.create_model("deit_tiny", dims=[32], depths=[1], mixers={"name": "attention", "relative_bias": True})
    torch.nn.init.normal_(model.get_parameter("stages.0.blocks.0.token.branches.0.mixer.relative_bias.table"))
    model(torch.randn(1, 3, 96, 64)).sum().backward()
    larger = mixlab.create_model(
        "deit_tiny", dims=[32], depths=[1], mixers={"name": "attention", "relative_bias": True}, image_size=512
    )
    mixlab.load_weights(larger, model.state_dict())
    table = larger.get_parameter("stages.0.blocks.0.token.branches.0.mixer.relative_bias.table")
    assert table.shape == (1, 63, 63)


def test_a_window_has_no_relative_bias() -> None:
    with pytest.raises(ConfigError, match="no relative_bias"):
        MIXERS.parse({"name": "window_attention", "relative_bias": True})
