"""One process or many: who this one is, and sums over all of them."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from mixlab.core.errors import TrainingError

TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Processes:
    """`rank` of `world` processes, and the device of this one."""

    rank: int = 0
    world: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def first(self) -> bool:
        """The one that writes."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, on every one."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def least(self, value: int) -> int:
        """The smallest of all processes' values, on every one."""
        found = torch.tensor(value, device=self.device)
        if self.world > 1:
            dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()


@contextlib.contextmanager
def processes(device: str = "auto") -> Iterator[Processes]:
    """What torchrun or SLURM started; a process group for as long as it is needed."""
    rank, world, local = environment()
    chosen = choose_device(device, local)
    started = False
    if world > 1 and not dist.is_initialized():
        start_group(rank, world, chosen)
        started = True
    try:
        yield Processes(rank, world, chosen)
    finally:
        if started and dist.is_initialized():
            dist.destroy_process_group()


def environment() -> tuple[int, int, int]:
    """Rank, number of processes and rank on this machine, from torchrun's variables or SLURM's."""
    for names in (("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")):
        if all(name in os.environ for name in names):
            rank, world, local = (int(os.environ[name]) for name in names)
            return rank, world, local
    return 0, 1, 0


def start_group(rank: int, world: int, device: torch.device) -> None:
    if "MASTER_ADDR" not in os.environ:
        nodes = os.environ.get("SLURM_JOB_NODELIST", "")
        if any(mark in nodes for mark in "[,"):
            raise TrainingError(
                f"MASTER_ADDR is not set and SLURM's node list {nodes!r} names several machines. Set it to the first: "
                f"export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"
            )
        os.environ["MASTER_ADDR"] = nodes or "127.0.0.1"
    os.environ.setdefault("MASTER_PORT", str(20000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 20000))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=world, timeout=TIMEOUT)


def choose_device(name: str, local_rank: int) -> torch.device:
    """The device with this name, or an error if this machine does not have it; "auto" is CUDA, else the CPU."""
    if name != "auto":
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise TrainingError(f"Unknown device {name!r}: use cpu, cuda, cuda:1, mps or auto.") from error
        if device.type == "cuda" and not torch.cuda.is_available():
            raise TrainingError(f"Device {name!r} was asked for, but this PyTorch sees no CUDA device. Use cpu.")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise TrainingError(f"Device {name!r} was asked for, but the last of {count} is cuda:{count - 1}.")
        if device.type == "mps" and not torch.backends.mps.is_available():
            raise TrainingError(f"Device {name!r} was asked for, but this PyTorch sees no MPS device. Use cpu.")
        return torch.device("cuda", local_rank) if device.type == "cuda" and device.index is None else device
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
