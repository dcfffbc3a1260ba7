"""Whether a call of a model goes to the engine, and the plan that serves it: made once, kept, run."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mixlab.core.compat import has_modes
from mixlab.core.grid import Grid
from mixlab.core.guards import is_transformed
from mixlab.engine.cache import CACHE, Entry
from mixlab.engine.draft import CannotLower, Draft, Tokens
from mixlab.engine.kernels import has_wide_vectors, is_plain
from mixlab.engine.lowering import blocks, heads
from mixlab.engine.plan import Changed, Plan
from mixlab.engine.steps import PackedWeight, Place
from mixlab.engine.watch import Watch
from mixlab.models.backbone import Backbone

MOST = 4  # plans of a model that are kept: those for the image sizes that were used last
CALLS = ("forward", "embed", "features")
Visit = Callable[[str, Tensor, Grid], None]


class Served:
    """A plan with the grids of its outputs, or the reason why there is none."""

    def __init__(self, plan: Plan | None, grids: list[Grid], reason: str = "") -> None:
        self.plan, self.grids, self.reason = plan, grids, reason


# -- the decision --------------------------------------------------------------------------------


def reason_against(model: nn.Module, inputs: Tensor) -> str | None:
    """Why a call is left to PyTorch as a whole, whatever the model is made of; None if it is not."""
    if model.training:
        return "the model is in training mode"
    if torch.is_grad_enabled():
        return "gradients are recorded: call it under torch.inference_mode() or torch.no_grad()"
    if is_transformed():
        return "a tracer, a transform or forward differentiation follows the arithmetic"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    if has_modes():
        return "somebody listens to every operator"
    if not isinstance(inputs, Tensor) or not is_plain(inputs):
        return "the images are not float32 numbers of a CPU"
    if not has_wide_vectors():
        return "there are no kernels with vectors of 8 numbers or more on this machine"
    return None


def serve(model: nn.Module, call: str, image: Tensor, visit: Visit | None = None) -> Any:
    """The result of `model.<call>(image)`, or None if PyTorch computes it."""
    if reason_against(model, image) is not None:
        if model.training:
            CACHE.drop(model)
        return None
    served = plan_for(model, call, image, visited=visit is not None)
    if served.plan is None:
        return None
    try:
        outputs = served.plan.run(image if image.is_contiguous() else image.contiguous(), visit=visit)
    except Changed:
        CACHE.drop(model)
        return None
    return list(zip(outputs, served.grids, strict=True)) if call == "features" else outputs[0]


def plan_for(model: nn.Module, call: str, image: Tensor, *, visited: bool = False) -> Served:
    """The plan for images of this size: kept from an earlier call, or made now."""
    key = ("plan", call, visited, image.shape, torch.get_num_threads())
    served: Served | None = CACHE.find(model, key)
    if served is None:
        served, watch = make(model, call, image, visited=visited)
        CACHE.sweep(model)
        CACHE.keep(model, key, Entry(served, always if is_frozen(model) else watch.holds), MOST)
    return served


def always() -> bool:
    return True


# -- making a plan -------------------------------------------------------------------------------


def make(model: nn.Module, call: str, image: Tensor, *, visited: bool) -> tuple[Served, Watch]:
    """A plan for a call on images of this size, and the watch over what it is made from."""
    draft = Draft(model, names_of(model), FROZEN.get(model))
    try:
        assert isinstance(model, Backbone)
        draft.require(flows_as_written(model, call), f"{type(model).__name__} computes features in a way of its own")
        model.check_image(image)
        outputs, grids = lowered(draft, model, call, tuple(image.shape), visited=visited)
    except CannotLower as reason:
        return Served(None, [], str(reason)), Watch([], root=model)
    plan, watch = draft.close(outputs)
    return Served(plan, grids), watch


def flows_as_written(model: Backbone, call: str) -> bool:
    """Whether a call of a model passes through Backbone's own methods, which a subclass may replace."""
    inner = CALLS[CALLS.index(call) + 1 :]
    return all(getattr(type(model), name) is getattr(Backbone, name) and name not in vars(model) for name in inner)


def lowered(
    draft: Draft, model: Backbone, call: str, shape: tuple[int, ...], *, visited: bool
) -> tuple[list[int], list[Grid]]:
    """The rooms of the outputs and, for features, their grids."""
    image = draft.given(shape)
    outputs = blocks.features(draft, model, image, shape, visited=visited)
    if call == "features":
        return [draft.as_tensor(tokens.place, tokens.shape) for tokens in outputs], [tokens.grid for tokens in outputs]
    pooled = heads.readout(draft, model.readout, outputs)
    width = (shape[0], model.readout.width)
    if call == "embed":
        return [draft.as_tensor(pooled, width)], []
    scores = heads.head(draft, model.head, pooled, width, model.config.num_classes)
    return [scores.room], []


def names_of(model: nn.Module) -> dict[int, str]:
    """Paths of modules, and of what holds a module in common, by their ids."""
    names = {id(module): name for name, module in model.named_modules()}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if not attribute.startswith("_"):
                names.setdefault(id(value), f"{name}.{attribute}")
    return names


# -- parts alone, which compiled code calls ------------------------------------------------------


def serve_part(part: nn.Module, tokens: Tensor, grid: Grid) -> Tensor | None:
    """The output of a block, a branch or an MLP, or None if PyTorch computes it."""
    if reason_against(part, tokens) is not None or not tokens.is_contiguous() or tokens.shape[1] != grid.tokens:
        return None
    key = ("plan", tokens.shape, grid, torch.get_num_threads())
    served: Served | None = CACHE.find(part, key)
    if served is None:
        served, watch = make_part(part, tuple(tokens.shape), grid)
        CACHE.sweep(part)
        CACHE.keep(part, key, Entry(served, watch.holds), MOST)
    if served.plan is None:
        return None
    try:
        return served.plan.run(tokens)[0]
    except Changed:
        CACHE.drop(part)
        return None


def make_part(part: nn.Module, shape: tuple[int, ...], grid: Grid) -> tuple[Served, Watch]:
    draft = Draft(part, names_of(part))
    tokens = Tokens(draft.given(shape), shape[0], grid, shape[2])
    try:
        out = blocks.alone(draft, part, tokens)
    except CannotLower as reason:
        return Served(None, [], str(reason)), Watch([], root=part)
    plan, watch = draft.close([draft.as_tensor(out, shape)])
    return Served(plan, []), watch


# -- weights that do not change any more ---------------------------------------------------------

FROZEN: weakref.WeakKeyDictionary[nn.Module, dict[int, PackedWeight]] = weakref.WeakKeyDictionary()


def freeze(model: nn.Module) -> None:
    """Let plans of this model pack its weights once and assume that they never change. Only `optimize` may."""
    CACHE.drop(model)
    FROZEN[model] = {}


def thaw(model: nn.Module) -> None:
    """Take `freeze` back."""
    FROZEN.pop(model, None)
    CACHE.drop(model)


def is_frozen(model: nn.Module) -> bool:
    return model in FROZEN


def packed_weights(model: nn.Module) -> int:
    """How many weights of a frozen model are packed."""
    return len(FROZEN.get(model, ()))


__all__ = ["CALLS", "Place", "freeze", "serve", "serve_part", "thaw"]
