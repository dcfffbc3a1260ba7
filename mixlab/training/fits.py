"""How many images a step can take at once: what the backward pass needs per image, and what is free."""

from pathlib import Path

import torch
from torch import Tensor

from mixlab.core.errors import ConfigError
from mixlab.core.processes import Processes
from mixlab.metrics.macs import on_meta
from mixlab.models.dense_model import DenseModel, Trainable
from mixlab.models.model import Model

SHARE = 0.5  # of the free memory for what the backward pass keeps; the rest is for temporaries, data and others
MOST = 256  # images at once; more do not make a step more efficient


def micro_batch(model: Trainable, image_size: tuple[int, int], per_process: int, processes: Processes) -> int:
    """The largest divisor of a process's share of the batch that fits into memory."""
    free = free_bytes(processes.device)
    if free is not None and processes.device.type == "cpu":
        free //= processes.world  # on this machine, for all that is known
    most = MOST if free is None else min(MOST, int(SHARE * free / max(1, bytes_per_image(model, image_size))))
    if most < 1:
        raise ConfigError(
            f"One image of {image_size[0]} x {image_size[1]} px does not fit into the free memory ({free} bytes). Use "
            f"smaller images or a smaller model, or checkpointing."
        )
    return next(size for size in range(min(most, per_process), 0, -1) if per_process % size == 0)


def bytes_per_image(model: Trainable, image_size: tuple[int, int]) -> int:
    """What autograd keeps of one image between the passes, counted on tensors without data.

    Of a model on a backbone, only the backbone's maps are; what is built on them keeps about as much again.
    """
    if isinstance(model, DenseModel):
        return 2 * bytes_per_image(model.backbone, image_size)

    seen: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[storage._cdata] = storage.nbytes()
        return tensor

    shadow = on_meta(model).train()
    assert isinstance(shadow, Model)
    weights = {parameter.untyped_storage()._cdata for parameter in shadow.parameters()}
    image = torch.empty(2, model.config.in_channels, *image_size, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if shadow.config.num_classes:
            shadow(image)
        else:
            shadow.pyramid(image)
    return sum(size for storage, size in seen.items() if storage not in weights) // len(image)


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device; None where nobody knows."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
