"""Every test starts from the same random state, and workers share the cores."""

import os

import pytest
import torch

import mixlab  # noqa: F401  (before anything imports torchvision)

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
