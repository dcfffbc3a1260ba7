"""torch.compile block by block: blocks of one kind share one compiled graph."""

import os
import shutil
from typing import Any

import torch
from torch import nn

from mixlab.core.errors import CompileError
from mixlab.models.backbone import Backbone
from mixlab.models.layers import Branch, Mlp
from mixlab.models.mixers import Mixer
from mixlab.models.model import Model

COMPILERS = ("g++", "clang++", "cl")
GRAPH_LIMIT = 1024  # per kind of call: blocks of different widths, image sizes, training and evaluation


def compile_blocks(
    model: Model, *, backend: str = "inductor", dynamic: bool = False, fallback: bool = False, **options: Any
) -> Model:
    """Compile every block in place and return the model; the stem, downsampling and head stay eager.

    A model has many blocks but few kinds of them. Compiled one by one, all blocks of a kind use the first one's
    graph, so the cost is a few graphs instead of one as long as the model. Each image size is compiled when it first
    comes; `dynamic=True` compiles once for all sizes, into slower code. Blocks that cannot be compiled for training
    (recurrent ones) run eager when gradients are recorded. Without a C++ compiler it raises, or with `fallback`
    returns the model as it is. `options` go to torch.compile. Dynamo's limit on graphs is raised for the process.
    """
    if backend == "inductor" and next(model.parameters()).device.type == "cpu" and not has_compiler():
        if fallback:
            return model
        raise CompileError(
            "torch.compile needs a C++ compiler for the CPU and found none ($CXX, g++, clang++, cl). "
            "Install one (Debian: apt-get install g++), or run the model without compiling it."
        )
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, GRAPH_LIMIT)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, GRAPH_LIMIT)
    for unit in units(model):
        unit.compile(backend=backend, fullgraph=True, dynamic=dynamic, **options)
        if not all(module.trains_compiled for module in unit.modules() if isinstance(module, Mixer)):
            unit._compiled_call_impl = InferenceOnly(unit, unit._compiled_call_impl)
    return model


def units(model: Model) -> list[nn.Module]:
    """What is compiled on its own: blocks, or what the serial and parallel blocks of a co-scale model share."""
    return [unit for backbone in model.backbones for unit in units_of(backbone)]


def units_of(backbone: Backbone) -> list[nn.Module]:
    if backbone.coscale is None:
        return list(backbone.blocks.values())
    modules = list(backbone.modules())
    mixing = [module for module in modules if isinstance(module, Branch) and isinstance(module.mixer, Mixer)]
    return [*mixing, *(module for module in modules if isinstance(module, Mlp))]


class InferenceOnly:
    """A compiled call of a module that steps aside when gradients are recorded."""

    def __init__(self, module: nn.Module, compiled: Any) -> None:
        self.module = module
        self.compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.module._call_impl if torch.is_grad_enabled() else self.compiled
        return call(*args, **kwargs)


def has_compiler() -> bool:
    """Whether there is a C++ compiler that torch.compile would find for a CPU."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", COMPILERS[0]), *COMPILERS))
