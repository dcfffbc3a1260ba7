"""GPU hours of a training that starts from weights and goes to other data."""

import functools
from typing import Any

import torch

import mixlab
from mixlab.cli.arguments import pairs
from mixlab.dense.detector import create_detector
from mixlab.dense.segmenter import create_segmenter
from mixlab.evals.compute import BACKWARD, epochs_of, training_compute
from mixlab.training.recipe import Recipe, load_recipe

DETECTION_SIZE = (800, 1280)  # the size at which the papers count; recipes draw smaller ones too
VTAB_TASKS, VTAB_TRAIN = 19, 800  # images for the sweep; all of them for the result


def downstream_hours(model: str, recipe: str, images: int, tflops: float, *, change: str = "", kind: str = "") -> float:
    """With what --model-set would change, and another kind of detector than the recipe's."""
    kept = load_recipe(recipe, model=model)
    if kept.task == "classification":
        run = training_compute(model, kept, images=images, form="mask")
        return run.gpu_hours(tflops) * (1 if kept.sweep is None else sweep_factor(kept))
    macs = dense_macs(model, recipe, change, kind)
    steps = kept.schedule.updates or 0
    seen = steps * kept.batch_size if steps else epochs_of(kept, images) * images
    return 2 * (1 + BACKWARD) * macs * seen / (tflops * 1e12 * 3600)


def sweep_factor(recipe: Recipe) -> float:
    """Trainings on all images of one dataset that the protocol amounts to, over all datasets."""
    assert recipe.sweep is not None
    search = len(recipe.sweep.lr) * recipe.sweep.seeds * VTAB_TRAIN / 1000
    return VTAB_TASKS * (search + recipe.sweep.seeds)


@functools.cache
def dense_macs(model: str, recipe: str, change: str, kind: str) -> int:
    """Of one training image with the decoder or detector, its auxiliary head left out."""
    kept = load_recipe(recipe, model=model)
    options = pairs(change.split("; ") if change else [], "change")
    with torch.device("meta"):
        if kept.segmentation is not None:
            words: dict[str, Any] = {"width": kept.segmentation.width, "norms": kept.segmentation.norms}
            decoder = kept.segmentation.decoder
            whole = create_segmenter(model, decoder, num_classes=150, backbone_options=options, **words)
            return mixlab.macs(whole, kept.image_size or 512)
        assert kept.detector is not None
        norms = kept.detector.norms
        named: Any = kind or kept.detector.kind
        detector = create_detector(model, named, num_classes=80, backbone_options=options, norms=norms)
    return mixlab.macs(detector, DETECTION_SIZE)
