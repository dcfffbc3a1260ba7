"""From a model to a graph of operators for one image size: what is constant is computed, and no number is complex."""

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from mixlab.core.compat import OpOverload
from mixlab.core.errors import ExportError
from mixlab.core.grid import Grid
from mixlab.deploy.recurrence import traced_by_shape

Program = torch.export.ExportedProgram
TRACED = 2  # images of a batch whose size stays open: 1 would be taken for a constant


# -- the model with constants in it --------------------------------------------------------------


@torch.no_grad()
def fixed_copy(model: nn.Module, images: Tensor) -> nn.Module:
    """A copy on the CPU for images of this size, with constants for what its modules make of parameters and the grid.

    A module that has a method `fixed(grid)` is called with (tokens, grid), and what that method gives takes its place.
    """
    own = copy.deepcopy(model).cpu().eval().requires_grad_(False)
    grids: dict[str, Grid] = {}
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs, name=name: grids.update({name: inputs[1]}))
        for name, module in own.named_modules()
        if callable(getattr(module, "fixed", None))
    ]
    own(images)
    for hook in hooks:
        hook.remove()
    for name, grid in grids.items():
        parent, _, child = name.rpartition(".")
        make: Callable[[Grid], nn.Module] = getattr(own.get_submodule(name), "fixed")  # noqa: B009  not every module has it
        setattr(own.get_submodule(parent), child, make(grid))
    own(images)  # what is made at the first call and kept is there before anybody traces it
    return own


# -- the graph -----------------------------------------------------------------------------------


def trace(model: nn.Module, images: Tensor, *, dynamic: bool) -> Program:
    """The graph of a model in eval mode for images of this size, and this many unless the batch is dynamic."""
    program = capture(fixed_copy(model, images), images, dynamic=dynamic)
    folded = fold_constants(program.module(check_guards=False))
    program = capture(folded, images, dynamic=dynamic)
    check_real(program)
    return program


def capture(model: nn.Module, images: Tensor, *, dynamic: bool) -> Program:
    shapes = ({0: torch.export.Dim("batch", min=1)} if dynamic else {},)
    try:
        with torch.no_grad(), quietly(), traced_by_shape("lstm", "gru", "rnn"):
            return torch.export.export(model, (images,), dynamic_shapes=shapes, strict=False)
    except Exception as error:  # whatever a model does that a tracer cannot follow
        raise ExportError(f"The model cannot be written down as a graph: {first_lines(error)}") from error


@torch.no_grad()
def fold_constants(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Compute once what follows from parameters alone: resampled tables, merged weights. Views of these stay views."""
    graph, values = graph_module.graph, {}
    written = overwritten(graph)
    for node in graph.nodes:
        if node.op == "get_attr" and node not in written:
            values[node] = attribute(graph_module, node.target)
        elif is_pure(node) and node not in written and all(one in values for one in node.all_input_nodes):
            values[node] = node.target(
                *fx.map_arg(node.args, values.__getitem__), **fx.map_arg(node.kwargs, values.__getitem__)
            )
    index = 0
    for node in [node for node in values if node.op == "call_function" and isinstance(values[node], Tensor)]:
        if is_view(node) or all(user in values and not is_view(user) for user in node.users):
            continue
        name = f"constant_{index}"
        index += 1
        graph_module.register_buffer(name, values[node].clone().contiguous())
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.get_attr(name))
    graph.eliminate_dead_code()
    remove_unused(graph_module)
    graph_module.recompile()
    return graph_module


def overwritten(graph: fx.Graph) -> set[fx.Node]:
    """Tensors that an operator writes into, and those that they are views of."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        writes = isinstance(node.target, OpOverload) and node.target._schema.is_mutable
        if writes or (node in found and is_view(node)):
            found.update(node.all_input_nodes[:1])
        if writes:
            found.add(node)
    return found


def is_pure(node: fx.Node) -> bool:
    """Whether equal inputs give equal outputs and nothing else happens."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload) or target._schema.is_mutable:
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags


def is_view(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and any(one.alias_info for one in target._schema.returns)


def attribute(module: nn.Module, path: Any) -> Any:
    parent, _, name = str(path).rpartition(".")
    return getattr(module.get_submodule(parent), name)


def remove_unused(graph_module: fx.GraphModule) -> None:
    """Parameters and buffers that no node reads any more."""
    used = {node.target for node in graph_module.graph.nodes if node.op == "get_attr"}
    tensors = [*graph_module.named_parameters(), *graph_module.named_buffers()]
    for path in {name for name, _ in tensors} - used:
        parent, _, name = path.rpartition(".")
        delattr(graph_module.get_submodule(parent), name)


def check_real(program: Program) -> None:
    """No tensor of the graph may be complex: other programs have no such numbers."""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        values = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(one, Tensor) and one.is_complex() for one in values):
            raise ExportError(
                f"The graph holds complex numbers, made by {node.target}. A mixer that needs them must have a `fixed` "
                f"form in real arithmetic, as Hyena's long convolution has."
            )


# -- what exporters say --------------------------------------------------------------------------


@contextmanager
def quietly() -> Iterator[None]:
    """Without what exporters say about their own insides."""
    loggers = [logging.getLogger(name) for name in ("onnxscript", "onnx_ir", "torch.onnx", "torch.export")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def first_lines(error: Exception, count: int = 3) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:count]) or type(error).__name__
