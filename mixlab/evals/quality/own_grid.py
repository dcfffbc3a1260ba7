"""Image sizes that are whole steps of a model's grid, so that nothing is padded (Sequencer, Figure 3)."""

import math
from collections.abc import Iterable
from typing import Literal

from mixlab.core.errors import ConfigError, require
from mixlab.core.grid import Grid
from mixlab.evals.subjects import Subject
from mixlab.models.backbone import Backbone
from mixlab.models.config import MIN_SIDE
from mixlab.models.model import Model

OWN: Literal["own"] = "own"
STEPS_PER_SIDE = 8  # of the size trained at: Figure 3 steps 224 px by 28 or 32
PAPER_STEP = 28  # px; larger images get no larger steps
Step = Literal["own"] | int | None
Size = tuple[int, int]


def parse_step(text: str | int | None) -> Step:
    """'own', or a number of pixels for every model."""
    if text is None or text == OWN:
        return text
    try:
        step = int(text)
    except ValueError:
        step = 0
    if step < 1:
        raise ConfigError(f"A step is 'own' (each model's own grid) or pixels such as 32 for all models; got {text!r}.")
    return step


def total_stride(subject: Subject) -> int | None:
    """The least common multiple of a model's strides; None if a model of timm does not state them."""
    if isinstance(subject.model, Model):
        return math.lcm(*(stride for member in subject.model.backbones for stride in member.strides))
    stages = getattr(subject.model, "feature_info", None)
    strides = [stage.get("reduction") for stage in stages] if isinstance(stages, list) else []
    whole = [int(stride) for stride in strides if stride and int(stride) == stride]
    return math.lcm(*whole) if whole and len(whole) == len(strides) else None


def own_step(subject: Subject) -> int:
    """Pixels: the smallest multiple of a model's strides that is the paper's 28, or an eighth of a small model's side.

    At 224 px it is 28 for strides of 7 and 14, and 32 for those of 16 and 32.
    """
    stride = total_stride(subject)
    if stride is None:
        raise ConfigError(
            f"{subject.name!r} does not state its strides, so its own step is not known. "
            "Give one in pixels, such as --step 32, or leave the model or --step out."
        )
    least = min(PAPER_STEP, max(subject.image_size) / STEPS_PER_SIDE)
    return stride * math.ceil(least / stride)


def on_grid(size: Size, step: int) -> Size:
    """The nearest multiples of the step that are large enough for a model; the larger one of two."""
    least = -(-MIN_SIDE // step)
    height, width = (step * max(least, (2 * side + step) // (2 * step)) for side in size)
    return height, width


def sizes_for(subject: Subject, asked: Iterable[Size], step: Step) -> list[Size]:
    """What was asked for, on the grid that `step` means for this model."""
    if step is None:
        return list(asked)
    require(step == OWN or step >= 1, f"a step of 'own' or of 1 px or more; got {step!r}.")
    pixels = own_step(subject) if step == OWN else step
    return list(dict.fromkeys(on_grid(size, pixels) for size in asked))


def is_padded(subject: Subject, size: Size) -> bool | None:
    """Whether the model pads an image of this size up to its patches; None if a model of timm may do so."""
    if isinstance(subject.model, Model):
        return any(pads(member, size) for member in subject.model.backbones)
    stride = total_stride(subject)
    return False if stride is not None and not any(side % stride for side in size) else None


def pads(model: Backbone, size: Size) -> bool:
    grid = Grid(*size)
    for step in [model.stem, *(stage.downsample for stage in model.stages if stage.downsample is not None)]:
        if step.pads(grid):
            return True
        grid = step.grid_after(grid)
    return False
