"""The arithmetic of a training run that is over."""

from collections.abc import Sequence

from mixlab.evals.cost.compute import phase_of
from mixlab.evals.cost.summary import shadow
from mixlab.models.config import ModelConfig
from mixlab.training.recipe import parse_recipe
from mixlab.training.run import RunConfig


def flops_of_run(run: RunConfig, models: Sequence[ModelConfig], images: int | None) -> float | None:
    """Return all floating-point operations of a classifier's training, or None if they are not known.

    `models` are the configs in the weight file of the run, several for an ensemble; `images` are those of an epoch.
    A run with `freeze_layers` is not counted: it spares an unknown part of the backward pass.
    """
    if images is None or run.freeze_layers:
        return None
    recipe = parse_recipe(run.recipe, "the run's recipe")
    total = 0.0
    for model in models:
        form = "mask" if run.compile else model.drop_path.form  # compiled code always masks
        total += phase_of(shadow(model), recipe, images=images, form=form).total_flops
    return total
