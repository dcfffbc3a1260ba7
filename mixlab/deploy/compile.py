"""torch.compile block by block: blocks of one kind share one compiled graph."""

import shutil
from typing import Any

import torch

from mixlab.backbone import Backbone
from mixlab.errors import CompileError

GRAPHS_PER_KIND = 4  # training and evaluation, with and without gradients


def compile_blocks(model: Backbone, *, dynamic: bool = False, **options: Any) -> Backbone:
    """Compile every block in place and return the model; the stem, downsampling and head stay eager.

    A model has many blocks but few kinds of them. Compiled one by one, all blocks of a kind use the first one's
    graph, so the cost is a few graphs instead of one as long as the model. `dynamic=True` compiles for images
    of any size at once. `options` go to torch.compile.
    """
    blocks = [block for stage in model.stages for block in stage.blocks]
    check_compiler(model)
    limit = GRAPHS_PER_KIND * len(blocks)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
    for block in blocks:
        block.compile(fullgraph=True, dynamic=dynamic, **options)
    return model


def check_compiler(model: Backbone) -> None:
    """torch.compile turns CPU code into C++: say so before it fails in the middle of something."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    if on_cpu and not any(shutil.which(name) for name in ("g++", "clang++", "cl")):
        raise CompileError(
            "torch.compile needs a C++ compiler for the CPU and found none of g++, clang++, cl. "
            "Install one (Debian: apt-get install g++), or run the model without compiling it."
        )
