import copy

import pytest
import torch

from mixlab.core.errors import ConfigError
from mixlab.core.grid import Grid
from mixlab.models.mixers import MIXERS
from tests.models.mixers.contract import MixerContract


class TestRnn2d(MixerContract):
    name = "rnn2d"

    def test_a_token_reaches_its_row_and_column_and_nothing_else(self) -> None:
        grid, mixer = Grid(5, 4), self.mixer()
        tokens = torch.randn(1, 20, self.dim)
        changed = tokens.clone()
        changed[0, 2 * 4 + 1] += 1
        moved = (mixer(tokens, grid) - mixer(changed, grid)).abs().sum(-1)[0].reshape(5, 4) > 1e-7
        expected = torch.zeros(5, 4, dtype=torch.bool)
        expected[2], expected[:, 1] = True, True
        assert torch.equal(moved, expected)

    def test_copies_keep_their_weights_contiguous(self) -> None:
        twin = copy.deepcopy(self.mixer())
        assert all(parameter.is_contiguous() for parameter in twin.parameters())


class TestGru2d(MixerContract):
    name = "rnn2d"
    options = {"cell": "gru", "merge": "add"}


class TestUnidirectionalRnn2d(MixerContract):
    name = "rnn2d"
    options = {"cell": "rnn", "bidirectional": False, "hidden_ratio": 0.3}


class TestVertical(MixerContract):
    name = "rnn2d"
    options = {"axes": "vertical", "hidden_ratio": 0.5, "fusion": False}

    def test_only_columns_mix(self) -> None:
        grid, mixer = Grid(5, 4), self.mixer()
        tokens = torch.randn(1, 20, self.dim)
        changed = tokens.clone()
        changed[0, 2 * 4 + 1] += 1
        moved = (mixer(tokens, grid) - mixer(changed, grid)).abs().sum(-1)[0].reshape(5, 4) > 1e-7
        assert moved[:, 1].all()
        assert moved.sum() == 5


class TestRnn1d(MixerContract):
    name = "rnn1d"


class TestFusedRnn1d(MixerContract):
    name = "rnn1d"
    dim = 27
    options = {"fusion": True, "cell": "gru"}


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "rnn2d", "fusion": False, "hidden_ratio": 0.5},
        {"name": "rnn2d", "fusion": False, "axes": "vertical"},
        {"name": "rnn1d", "bidirectional": False},
    ],
)
def test_widths_that_do_not_fit_without_fusion_are_an_error(entry: dict[str, object]) -> None:
    choice = MIXERS.parse(entry)
    with pytest.raises(ConfigError, match="Set fusion = true"):
        MIXERS.builder(choice)(choice.options, 32, 1, Grid(4, 4))


def test_a_negative_width_is_an_error() -> None:
    with pytest.raises(ConfigError, match="hidden_ratio must be above 0"):
        MIXERS.parse({"name": "rnn1d", "hidden_ratio": -1})
