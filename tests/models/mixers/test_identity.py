import torch

from mixlab.core.grid import Grid
from tests.models.mixers.contract import MixerContract


class TestIdentity(MixerContract):
    name = "identity"
    spatial = False

    def test_returns_its_input(self) -> None:
        tokens = torch.randn(2, 30, self.dim)
        assert torch.equal(self.mixer()(tokens, Grid(6, 5)), tokens)
