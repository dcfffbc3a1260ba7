import pytest

from mixlab.core.errors import ConfigError
from mixlab.models.mixers import MIXERS
from tests.models.mixers.contract import MixerContract


class TestSepConv(MixerContract):
    name = "sepconv"


class TestSmallSepConvWithBias(MixerContract):
    name = "sepconv"
    options = {"kernel": 3, "expansion": 1.5, "bias": True}


def test_an_even_kernel_is_an_error() -> None:
    with pytest.raises(ConfigError, match="odd kernel"):
        MIXERS.parse({"name": "sepconv", "kernel": 4})
