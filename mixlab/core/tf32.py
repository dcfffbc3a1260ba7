"""TF32: products of float32 numbers whose factors NVIDIA GPUs since Ampere round to 10 bits, to be faster."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from mixlab.core.errors import PrecisionError

AMPERE = (8, 0)  # compute capability


def check_tf32(device: torch.device) -> None:
    """Raise if a device does not have this arithmetic: PyTorch would compute in plain float32 and say nothing."""
    needed = "tf32 is arithmetic of NVIDIA GPUs with compute capability 8.0 or more (Ampere and later)"
    if device.type != "cuda" or torch.version.hip is not None:
        raise PrecisionError(f"{needed}, and this device is {device.type}. Use float32, or such a GPU.")
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < AMPERE:
        raise PrecisionError(f"{needed}, and {device} has {major}.{minor}. Use float32, or such a GPU.")


@contextlib.contextmanager
def tf32_set(allowed: bool) -> Iterator[None]:
    """Inside, all matrix products, convolutions and recurrent layers in float32 are TF32, or none is."""
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    try:
        for switch in switches:
            switch.allow_tf32 = allowed
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.allow_tf32 = value
