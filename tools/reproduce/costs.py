"""What the runs behind the papers' tables compute: multiply-accumulates and GPU hours by the formula of the page."""

import functools
from dataclasses import dataclass
from typing import Any

import torch

import mixlab
from mixlab.cli.arguments import pairs
from mixlab.dense.detector import create_detector
from mixlab.dense.segmenter import create_segmenter
from mixlab.evals.cost.compute import BACKWARD, TFLOPS, Phase, count_macs, epochs_of, training_compute
from mixlab.training.recipe import Recipe, load_recipe
from mixlab.training.routes import images_of
from tools.reproduce.tables import Target
from tools.reproduce.trainings import Training, data_of

DETECTION_SIZE = (800, 1280)  # the size at which the papers count; recipes draw smaller ones too
VTAB_TASKS, VTAB_TRAIN = 19, 800  # images for the sweep; all of them for the result


@dataclass(frozen=True)
class TrainingCosts:
    """Of a training in phases: multiply-accumulates of one image in the last one, and GPU hours of each."""

    gmacs: float  # billions
    hours: tuple[float, ...]


def gmacs(model: str, image_size: int) -> float:
    """Billions of multiply-accumulates of one image."""
    return count_macs(model, image_size) / 1e9


@functools.cache
def phase(model: str, recipe: str, image_size: int | None = None, change: str = "") -> Phase:
    """What `mixlab train` computes: blocks that stochastic depth drops are masked, not skipped."""
    changes = {} if image_size is None else {"image_size": image_size}
    chosen = load_recipe(recipe, model=model, changes=changes)
    images = images_of(data_of(recipe))
    return training_compute(model, chosen, images=images, form="mask", changes=options_of(change))


def options_of(change: str) -> dict[str, Any]:
    """What --model-set would make of a change."""
    return pairs(change.split("; ") if change else [], "change")


def training_costs(training: Training) -> TrainingCosts:
    phases = [phase(training.model, recipe, training.asked_size, training.change) for recipe in training.phases]
    return TrainingCosts(phases[-1].forward_macs / 1e9, tuple(each.gpu_hours(TFLOPS) for each in phases))


def transfer_hours(training: Training, target: Target) -> float:
    """GPU hours of a run from ImageNet weights to other data; of a sweep, those of all its runs."""
    model, images = training.model, images_of(target.data)
    recipe = load_recipe(target.recipe, model=model)
    changes = [part for part in (training.change, target.change_of(model)) if part]
    if recipe.task == "classification":
        run = training_compute(model, recipe, images=images, form="mask", changes=options_of("; ".join(changes)))
        return run.gpu_hours(TFLOPS) * (1 if recipe.sweep is None else sweep_factor(recipe))
    macs = dense_macs(model, target.recipe, "; ".join(changes), target.set.partition("=")[2])
    return 2 * (1 + BACKWARD) * macs * epochs_of(recipe, images) * images / (TFLOPS * 1e12 * 3600)


def sweep_factor(recipe: Recipe) -> float:
    """Trainings on all images of one dataset that the protocol amounts to, over all datasets."""
    assert recipe.sweep is not None
    search = len(recipe.sweep.lr) * recipe.sweep.seeds * VTAB_TRAIN / 1000
    return VTAB_TASKS * (search + recipe.sweep.seeds)


@functools.cache
def dense_macs(model: str, recipe_name: str, change: str, kind: str) -> int:
    """Of one training image with the decoder or detector, its auxiliary head left out."""
    recipe = load_recipe(recipe_name, model=model)
    options = options_of(change)
    with torch.device("meta"):
        if recipe.segmentation is not None:
            words = recipe.segmentation
            settings: dict[str, Any] = {"width": words.width, "norms": words.norms}
            segmenter = create_segmenter(model, words.decoder, num_classes=150, backbone_options=options, **settings)
            return mixlab.macs(segmenter, recipe.image_size or 512)
        assert recipe.detector is not None
        settings = {"kind": kind or recipe.detector.kind, "norms": recipe.detector.norms}
        detector = create_detector(model, num_classes=80, backbone_options=options, **settings)
    return mixlab.macs(detector, DETECTION_SIZE)
