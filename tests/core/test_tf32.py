import contextlib
from collections.abc import Iterator

import pytest
import torch

from mixlab.core.errors import PrecisionError
from mixlab.core.tf32 import check_tf32, tf32_set


def switches() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.fixture
def untouched() -> Iterator[None]:
    before = switches()
    yield
    set_to(before)


def set_to(values: tuple[bool, bool]) -> None:
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = values


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("before", [(True, False), (False, True)])
def test_products_are_tf32_inside_and_as_before_outside(allowed: bool, before: tuple[bool, bool]) -> None:
    set_to(before)
    with tf32_set(allowed):
        assert switches() == (allowed, allowed)
    assert switches() == before


@pytest.mark.usefixtures("untouched")
def test_an_error_inside_leaves_everything_as_before() -> None:
    set_to((True, False))
    with contextlib.suppress(KeyError), tf32_set(False):
        raise KeyError
    assert switches() == (True, False)


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_only_nvidia_gpus_have_tf32(device: str) -> None:
    with pytest.raises(PrecisionError, match=f"this device is {device}. Use float32"):
        check_tf32(torch.device(device))


def test_a_gpu_before_ampere_has_no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    with pytest.raises(PrecisionError, match=r"cuda:0 has 7\.0"):
        check_tf32(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    check_tf32(torch.device("cuda", 0))
