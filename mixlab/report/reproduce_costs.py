"""GPU hours of a training that starts from weights and goes to other data."""

import functools

import torch

import mixlab
from mixlab.dense.detector import create_detector
from mixlab.dense.segmenter import create_segmenter
from mixlab.errors import MacsError
from mixlab.evals.compute import BACKWARD, epochs_of, training_compute
from mixlab.training.recipe import Recipe, load_recipe

DETECTION_SIZE = (800, 1280)  # the size at which the papers count; recipes draw smaller ones too
VTAB_TASKS, VTAB_TRAIN = 19, 800  # images for the sweep; all of them for the result


def downstream_hours(model: str, recipe: str, change: str | None, images: int, tflops: float) -> float | None:
    """None where an operator's multiply-accumulates are not known (Deformable DETR's sampling)."""
    kept = load_recipe(recipe, model=model)
    if kept.task == "classification":
        run = training_compute(model, kept, images=images, form="mask")
        return run.gpu_hours(tflops) * (1 if kept.sweep is None else sweep_factor(kept))
    macs = dense_macs(model, recipe, change or "")
    if macs is None:
        return None
    steps = kept.schedule.updates or 0
    seen = steps * kept.batch_size if steps else epochs_of(kept, images) * images
    return 2 * (1 + BACKWARD) * macs * seen / (tflops * 1e12 * 3600)


def sweep_factor(recipe: Recipe) -> float:
    """Trainings on all images of one dataset that the protocol amounts to, over all datasets."""
    assert recipe.sweep is not None
    search = len(recipe.sweep.lr) * recipe.sweep.seeds * VTAB_TRAIN / 1000
    return VTAB_TASKS * (search + recipe.sweep.seeds)


@functools.cache
def dense_macs(model: str, recipe: str, change: str) -> int | None:
    """Of one training image with the decoder or detector, its auxiliary head left out."""
    kept = load_recipe(recipe, model=model)
    with torch.device("meta"):
        if kept.task == "segmentation":
            assert kept.segmentation is not None and kept.image_size is not None
            words = {"width": kept.segmentation.width, "norms": kept.segmentation.norms}
            whole = create_segmenter(model, kept.segmentation.decoder, num_classes=150, **words)
            return mixlab.macs(whole, kept.image_size)
        assert kept.detector is not None
        kind = change.partition("=")[2] or kept.detector.kind
        whole = create_detector(model, kind, num_classes=80, norms=kept.detector.norms)
    try:
        return mixlab.macs(whole, DETECTION_SIZE)
    except MacsError:
        return None


