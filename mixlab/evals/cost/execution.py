"""How a model is run when its cost is measured: inference or a training step, precision, layout, compiled or not."""

import contextlib
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from mixlab.core.errors import CompileError, ConfigError, near_misses
from mixlab.core.guards import check_cpu_dtype
from mixlab.core.tf32 import check_tf32, tf32_set
from mixlab.engine.compile import compile_blocks, has_compiler
from mixlab.metrics.timing import Run
from mixlab.models.model import Model

DTYPES = {
    "float32": torch.float32,
    "tf32": torch.float32,  # with the products in TF32
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
OPTIMISERS = ("none", "adamw", "lamb", "sgd")
RATE = 1e-7  # of optimizers: what is measured must not move the weights anywhere


@dataclass(frozen=True, kw_only=True)
class Execution:
    """In inference, weights and images have the dtype. In training the weights stay float32 and a smaller dtype is
    autocast's, as `mixlab train` does it; without an optimizer the step is forward and backward.
    """

    training: bool = False
    dtype: str = "float32"
    layout: str = "contiguous"
    compiled: bool = False
    optimizer: str = "none"

    def __post_init__(self) -> None:
        for kind, given, known in (
            ("dtype", self.dtype, DTYPES),
            ("layout", self.layout, LAYOUTS),
            ("optimizer", self.optimizer, OPTIMISERS),
        ):
            if given not in known:
                raise ConfigError(f"Unknown {kind} {given!r}. {near_misses(str(given), known)}")
        if self.optimizer != "none" and not self.training:
            raise ConfigError(f"The optimizer {self.optimizer!r} belongs to a training step, not to inference.")

    @property
    def casts(self) -> bool:
        """Whether autocast chooses the dtype of the arithmetic."""
        return self.training and self.dtype in ("bfloat16", "float16")

    def check(self, device: torch.device) -> None:
        """Raise before arithmetic that would end the process, or for code that cannot be compiled."""
        check_dtype(self.dtype, device)
        if self.compiled:
            require_compiler(device)

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model in mode, dtype and layout, changed in place, and compiled."""
        model.train(self.training)
        model.to(memory_format=LAYOUTS[self.layout])  # type: ignore[call-overload]
        if not self.casts:
            model.to(DTYPES[self.dtype])
        return compile_model(model) if self.compiled else model

    def images(self, model: nn.Module, batch: int, size: tuple[int, int], in_channels: int | None = None) -> Tensor:
        images = random_images(model, batch, *size, in_channels)
        return images.contiguous(memory_format=LAYOUTS[self.layout])

    def runner(self, model: nn.Module, images: Tensor) -> Run:
        """One run of a prepared model, which ends when the device is done."""
        optimizer = build_optimizer(self.optimizer, model)
        device = images.device

        def run() -> None:
            with self.autocast(device):
                step(model, images, training=self.training, optimizer=optimizer)
            wait_for(device)

        return run

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(device.type, DTYPES[self.dtype]) if self.casts else contextlib.nullcontext()


def check_dtype(dtype: str, device: torch.device) -> None:
    """Raise before arithmetic that a device cannot do, or that would end the process."""
    if dtype == "tf32":
        check_tf32(device)
    elif device.type == "cpu":
        check_cpu_dtype(DTYPES[dtype])


def products_of(dtype: str, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """On CUDA, TF32 for the dtype tf32 and none for float32, whatever PyTorch is set to outside."""
    if device.type != "cuda" or dtype not in ("float32", "tf32"):
        return contextlib.nullcontext()
    return tf32_set(dtype == "tf32")


def build_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer | None:
    if name == "none":
        return None
    from timm.optim import create_optimizer_v2

    extra = {"momentum": 0.9} if name == "sgd" else {"fused": True} if name == "adamw" else {}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    known = "momentum" if name == "sgd" else name  # timm's "sgd" is Nesterov's
    return create_optimizer_v2(trained, opt=known, lr=RATE, weight_decay=0.0, **extra)


def require_compiler(device: torch.device) -> None:
    if device.type == "cpu" and not has_compiler():
        raise CompileError("torch.compile needs a C++ compiler for the CPU and found none ($CXX, g++, clang++, cl).")


def compile_model(model: nn.Module) -> nn.Module:
    """A Mixlab model block by block, any other as a whole."""
    if isinstance(model, Model):
        return compile_blocks(model)
    require_compiler(next(model.parameters()).device)
    return cast(nn.Module, torch.compile(model))


def step(model: nn.Module, images: Tensor, *, training: bool, optimizer: torch.optim.Optimizer | None = None) -> None:
    if not training:
        with torch.inference_mode():
            model(images)
        return
    with torch.inference_mode(False), torch.enable_grad():
        model(images).float().square().mean().backward()
    if optimizer is not None:
        optimizer.step()
    for parameter in model.parameters():
        parameter.grad = None


def random_images(model: nn.Module, batch: int, height: int, width: int, in_channels: int | None = None) -> Tensor:
    """Images that a model takes, in its dtype and on its device."""
    backbone = next((part for part in model.modules() if isinstance(part, Model)), None)
    if in_channels is None and backbone is None:
        raise ConfigError(
            f"Speed is measured of a Mixlab model, or a module that holds one; got {type(model)}. "
            f"Of any other model of images, say the in_channels."
        )
    channels = backbone.config.in_channels if in_channels is None and backbone is not None else in_channels
    weight = next(model.parameters())
    with torch.inference_mode(False):
        return torch.randn(batch, channels or 0, height, width, device=weight.device, dtype=weight.dtype)


def wait_for(device: torch.device) -> None:
    """Block until this accelerator has finished all the work that it was given."""
    if device.type == "mps":  # there is one only
        torch.mps.synchronize()
    elif device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
