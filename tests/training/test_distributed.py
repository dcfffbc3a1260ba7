"""Two CPU processes train as one, and copies for averaging follow their model."""

import copy
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import mixlab

NAMES = ["sequencer2d_pico", "coat_tiny"]
PATIENCE = 60  # seconds that one process waits for the other


def model_of(name: str) -> mixlab.Backbone:
    torch.manual_seed(0)
    model = mixlab.create_model(name, dims=[16] * 4, depths=[1] * 4, num_classes=3, image_size=32)
    torch.nn.init.normal_(model.get_parameter("head.classifier.weight"))
    return model


def batch(part: slice) -> torch.Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))[part]


def step(model: torch.nn.Module, image: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(image).square().mean().backward()
    optimizer.step()


def work(rank: int, name: str, folder: str) -> None:
    torch.set_num_threads(1)
    meeting, limit = f"file://{folder}/meet", timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=limit)
    model = DistributedDataParallel(model_of(name))
    step(model, batch(slice(2 * rank, 2 * rank + 2)))
    if rank == 0:
        mixlab.save_weights(model, f"{folder}/two.safetensors")
    dist.barrier()  # nobody leaves while another still works
    dist.destroy_process_group()


def run_both(name: str, folder: Path) -> None:
    """Two processes, or an error: one that waits forever is ended."""
    processes = spawn(work, (name, str(folder)), nprocs=2, join=False)
    deadline = time.monotonic() + 2 * PATIENCE
    while not processes.join(timeout=1):
        if time.monotonic() > deadline:
            for process in processes.processes:
                process.kill()
            raise TimeoutError(f"two processes did not finish within {2 * PATIENCE} s")


@pytest.mark.heavy  # processes that wait for each other do not belong into a run that must end
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_train_as_one(name: str, tmp_path: Path) -> None:
    run_both(name, tmp_path)
    two, one = mixlab.create_model(weights=tmp_path / "two.safetensors"), model_of(name)
    step(one, batch(slice(None)))
    for key, value in one.state_dict().items():
        torch.testing.assert_close(two.state_dict()[key], value, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_an_average_of_weights_stays_contiguous_and_follows(name: str) -> None:
    model = model_of(name)
    average = torch.optim.swa_utils.AveragedModel(model)
    step(model, batch(slice(None)))
    average.update_parameters(model)
    twin = copy.deepcopy(average.module).eval()
    assert all(parameter.is_contiguous() for parameter in twin.parameters())
    image = batch(slice(1))
    assert torch.equal(twin(image), model.eval()(image))
