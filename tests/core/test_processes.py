import pytest
import torch

from mixlab.core.errors import TrainingError
from mixlab.core.processes import choose_device


def test_a_gpu_beyond_the_last_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1", 0) == torch.device("cuda:1")
    with pytest.raises(TrainingError, match="the last of 2 is cuda:1"):
        choose_device("cuda:2", 0)


def test_mps_on_a_machine_without_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(TrainingError, match="no MPS device"):
        choose_device("mps", 0)


def test_a_name_of_no_device_is_an_error() -> None:
    with pytest.raises(TrainingError, match="Unknown device 'gpu'"):
        choose_device("gpu", 0)
