"""What models cost without running them: MACs against resolution, and all the arithmetic of a training recipe."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mixlab.core.errors import ConfigError, require
from mixlab.evals.cost.bench import Watch, check_model, run_all
from mixlab.evals.cost.bench_figures import Curve, bars, colors_of, scaling_curves
from mixlab.evals.cost.imagenet import IMAGENET, IMAGENET_21K
from mixlab.evals.cost.scaling import exponent
from mixlab.evals.subjects import Subject, open_subject
from mixlab.findings.findings import Finding, Picture, finding
from mixlab.findings.svg import need
from mixlab.metrics.macs import MacCounter, macs_by_part, on_meta
from mixlab.models.backbone import Backbone
from mixlab.models.config import parse_image_size
from mixlab.models.ensemble import Ensemble
from mixlab.models.layers import Residual
from mixlab.models.model import Model
from mixlab.models.zoo import create_model, list_models
from mixlab.training.model_options import model_options, training_size
from mixlab.training.recipe import Recipe, load_recipe

SIZES = (128, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024)
BACKWARD = 2  # forward passes that a backward pass costs: one for the inputs, one for the weights
TFLOPS = 100.0  # a third of what an A100 does at its best in bf16


# -- MACs against resolution ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SizeRow:
    model: str
    image_size: tuple[int, int]
    macs: int | None = None
    reason: str = ""


def count_macs(model: str, image_size: int | tuple[int, int], changes: Mapping[str, Any] | None = None) -> int:
    """Of one image, for any text that `open_subject` takes, built for this size and with changes of its options."""
    size = parse_image_size(image_size)
    if model in list_models():
        with torch.device("meta"):
            built = create_model(model, **{"image_size": size, **(changes or {})})
            return sum(macs_by_part(built, size).values())
    subject = open_subject(model, image_size=size, changes=changes)
    if isinstance(subject.model, Model):
        return sum(macs_by_part(subject.model, size).values())
    return count_foreign(subject, size)


def count_foreign(subject: Subject, size: tuple[int, int]) -> int:
    """Of a model that is not Mixlab's, by the same rules."""
    shadow = on_meta(subject.model)
    counter = MacCounter()
    with counter, torch.no_grad():
        shadow(torch.empty(1, subject.in_channels, *size, device="meta"))
    return sum(counter.counts.values())


def macs_against_resolution(
    models: Sequence[str],
    *,
    sizes: Sequence[int | tuple[int, int]] = SIZES,
    changes: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
) -> tuple[Finding, dict[str, Any]]:
    """MACs per image over sizes; the exponent is that of the number of pixels, over the upper half of the sizes."""
    need("matplotlib.figure")
    require(bool(models and sizes), "at least one model and one size.")
    known = list(dict.fromkeys(map(parse_image_size, sizes)))
    for model in models:
        check_model(model, changes)
    jobs = [(model, size) for model in dict.fromkeys(models) for size in known]
    rows, interrupted = run_all(
        jobs,
        lambda job: SizeRow(model=job[0], image_size=job[1], macs=count_macs(*job, changes)),
        lambda job, reason: SizeRow(model=job[0], image_size=job[1], reason=reason),
        name=lambda job: f"{job[0]} {job[1][0]}x{job[1][1]}",
        watch=watch,
    )
    return report_sizes(rows, {"changes": dict(changes or {}), "interrupted": interrupted})


def report_sizes(rows: Sequence[SizeRow], settings: Mapping[str, Any]) -> tuple[Finding, dict[str, Any]]:
    models = list(dict.fromkeys(row.model for row in rows))
    slopes = {
        model: exponent({math.prod(row.image_size): row.macs for row in rows if row.model == model}) for model in models
    }
    curves = []
    for model in models:
        points = sorted((math.prod(row.image_size) ** 0.5, row.macs) for row in rows if row.model == model and row.macs)
        if points:
            told = "" if slopes[model] is None else f": pixels^{slopes[model]:.2f}"
            curves.append(Curve(model, model + told, [side for side, _ in points], [macs / 1e9 for _, macs in points]))
    figures = {"macs": scaling_curves({"GMACs per image": curves}, "image side, px")} if curves else {}
    caption = "multiply-accumulates against resolution; exponents of the number of pixels, over the larger half"
    found = finding(
        "bench_macs",
        f"MACs against resolution of {', '.join(models)}",
        ["model", "height", "width", "GMACs", "GFLOPs", "exponent", "reason"],
        [[row.model, *row.image_size, *giga(row.macs), slopes[row.model], row.reason] for row in rows],
        settings={**settings, "fit": "upper half of the sizes, of the number of pixels"},
        data={"rows": [{**asdict(row), "image_size": list(row.image_size)} for row in rows], "exponents": slopes},
        pictures=tuple(Picture(name=name, caption=caption) for name in figures),
    )
    return found, figures


def giga(macs: int | None) -> tuple[float | None, float | None]:
    return (None, None) if macs is None else (macs / 1e9, 2 * macs / 1e9)


# -- the arithmetic of a recipe ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Phase:
    """All arithmetic of one model under one recipe, evaluation not included.

    `forward_macs` are of one image. `kept_macs` are what stochastic depth that skips what it drops leaves of them on
    average (Vision-LSTM, B.2); where it masks, all are computed. A training step costs three times the forward pass.
    """

    model: str
    recipe: str
    image_size: tuple[int, int]
    drop_path: float
    drop_path_form: str
    images: int  # in an epoch
    epochs: float
    forward_macs: int
    kept_macs: float
    head_macs: int
    trains_head_only: bool

    @property
    def step_macs(self) -> float:
        """Of one image: forward and backward."""
        if self.trains_head_only:
            return self.forward_macs + BACKWARD * self.head_macs
        used = self.kept_macs if self.drop_path_form == "skip" else self.forward_macs
        return (1 + BACKWARD) * used

    @property
    def total_flops(self) -> float:
        return 2 * self.step_macs * self.images * self.epochs

    @property
    def saving(self) -> float:
        """The share of a step that skipping dropped blocks saves, or would save."""
        return 0.0 if self.trains_head_only else 1 - self.kept_macs / self.forward_macs

    def gpu_hours(self, tflops: float) -> float:
        return self.total_flops / (tflops * 1e12) / 3600

    def plain(self) -> dict[str, Any]:
        derived = {"step_macs": self.step_macs, "total_flops": self.total_flops, "saving": self.saving}
        return {**asdict(self), "image_size": list(self.image_size), **derived}


def training_compute(
    model: str,
    recipe: str | Recipe,
    *,
    images: int | None = None,
    form: str = "skip",
    num_classes: int = 1000,
    changes: Mapping[str, Any] | None = None,
    fresh: bool = True,
) -> Phase:
    """Of a named Mixlab model; `form` of stochastic depth is "skip" or "mask". Images are ImageNet's unless told.

    `changes` are options of the model beside those of the recipe; `fresh` is as for `model_options`.
    """
    require(images is None or images >= 1, f"1 training image or more; got {images}.")
    require(form in ("skip", "mask"), f"a form of drop path that is 'skip' or 'mask'; got {form!r}.")
    if model not in list_models():
        raise ConfigError(f"The compute of a recipe is counted for named models of Mixlab; got {model!r}.")
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, model=model)
    if recipe.task != "classification":
        raise ConfigError(f"The recipe {recipe.name!r} is for {recipe.task}; the compute is counted of classification.")
    images = imagenet_images(recipe) if images is None else images
    options = model_options(recipe, model, options=changes, fresh=fresh)
    with torch.device("meta"):
        built = create_model(model, **{"num_classes": num_classes, **options})
    if isinstance(built, Ensemble):
        raise ConfigError(f"{model!r} is an ensemble: count its members one by one.")
    return phase_of(built, recipe, images=images, form=form)


def phase_of(built: Backbone, recipe: Recipe, *, images: int, form: str) -> Phase:
    """Count the training of a model, which needs no data in its weights, by a recipe for classification."""
    height, width = training_size(recipe, built.config)
    other, residuals = macs_by_residual(built, (height, width))
    return Phase(
        model=built.config.name,
        recipe=recipe.name,
        image_size=(height, width),
        drop_path=built.config.drop_path.rate,
        drop_path_form=form,
        images=images,
        epochs=epochs_of(recipe, images),
        forward_macs=other + sum(macs for macs, _ in residuals),
        kept_macs=other + sum(macs * (1 - rate) for macs, rate in residuals),
        head_macs=macs_by_part(built, (height, width))["head"],
        trains_head_only=recipe.train_only == "head",
    )


def imagenet_images(recipe: Recipe) -> int:
    """In an epoch of the ImageNet that a recipe is for, which its name says."""
    return IMAGENET_21K if recipe.name.endswith("imagenet21k") else IMAGENET


def epochs_of(recipe: Recipe, images: int) -> float:
    """The cool-down included; a schedule in updates as the epochs that it amounts to."""
    schedule = recipe.schedule
    length = schedule.epochs if schedule.updates is None else schedule.updates * recipe.batch_size / images
    return (length or 0) + schedule.cooldown_epochs


def macs_by_residual(model: Backbone, size: tuple[int, int]) -> tuple[int, list[tuple[int, float]]]:
    """MACs outside of what stochastic depth drops, and of each residual branch with its rate.

    Token mixing of parallel blocks is never skipped: what it exchanges belongs to all samples.
    """
    shadow = on_meta(model)
    counter = MacCounter()
    rates: dict[str, float] = {}
    for name, module in shadow.named_modules():
        if isinstance(module, Residual):
            rates[name] = module.drop_rate
            module.register_forward_pre_hook(counter.enter(name))
            module.register_forward_hook(counter.leave)
    with counter, torch.no_grad():
        shadow(torch.empty(1, model.config.in_channels, *size, device="meta"))
    inside = [(counter.counts.get(name, 0), rate) for name, rate in rates.items()]
    return sum(counter.counts.values()) - sum(macs for macs, _ in inside), inside


def training_phases(
    model: str, recipes: Sequence[str], *, images: int | None, form: str, changes: Mapping[str, Any] | None
) -> list[Phase]:
    """One training: the first recipe starts afresh, each other one from the weights, so the architecture, before it."""
    loaded = [load_recipe(recipe, model=model) for recipe in recipes]
    own = {**loaded[0].model, **(changes or {})}
    return [
        training_compute(model, recipe, images=images, form=form, changes=own, fresh=index == 0)
        for index, recipe in enumerate(loaded)
    ]


def compute_of_recipes(
    models: Sequence[str],
    recipes: Sequence[str] | Mapping[str, Sequence[str]],
    *,
    images: int | None = None,
    form: str = "skip",
    tflops: float = TFLOPS,
    changes: Mapping[str, Any] | None = None,
) -> tuple[Finding, dict[str, Any]]:
    """The training compute of models; several recipes are phases of one training and add up.

    Recipes are the same for all models, or a mapping from each model to its own, as `phases.recipes_of` makes it.
    `tflops` is what a GPU really achieves in this training, in units of 10^12 floating-point operations per second.
    """
    need("matplotlib.figure")
    require(tflops > 0, f"achieved TFLOP/s above 0; got {tflops}.")
    require(bool(models and recipes), "at least one model and one recipe.")
    each = recipes if isinstance(recipes, Mapping) else dict.fromkeys(models, recipes)
    phases = {
        model: training_phases(model, each[model], images=images, form=form, changes=changes)
        for model in dict.fromkeys(models)
    }
    figures = {"training_compute": compute_bars(phases)}
    columns = ["model", "recipe", "px", "epochs", "drop path", "GMACs forward", "GMACs step", "saving", "total EFLOP"]
    caption = "all floating-point operations of a training, evaluation not included"
    found = finding(
        "bench_training_compute",
        f"Training compute of {', '.join(phases)}",
        [*columns, f"GPU hours at {tflops:g} TFLOP/s"],
        [row for model, own in phases.items() for row in rows_of(model, own, tflops)],
        settings={
            "recipes": {model: [phase.recipe for phase in own] for model, own in phases.items()},
            "images": {phase.recipe: phase.images for own in phases.values() for phase in own},
            "drop_path_form": form,
            "tflops": tflops,
            "step": 1 + BACKWARD,
            "changes": dict(changes or {}),
        },
        data={"phases": [phase.plain() for own in phases.values() for phase in own]},
        pictures=tuple(Picture(name=name, caption=caption) for name in figures),
    )
    return found, figures


def rows_of(model: str, phases: Sequence[Phase], tflops: float) -> list[list[Any]]:
    rows = [
        [
            *(model, phase.recipe, phase.image_size[0], phase.epochs, phase.drop_path),
            *(phase.forward_macs / 1e9, phase.step_macs / 1e9, phase.saving),
            *(phase.total_flops / 1e18, phase.gpu_hours(tflops)),
        ]
        for phase in phases
    ]
    if len(phases) > 1:
        total, hours = sum(phase.total_flops for phase in phases), sum(phase.gpu_hours(tflops) for phase in phases)
        empty = [None] * 4
        rows.append([model, "all", None, sum(phase.epochs for phase in phases), *empty, total / 1e18, hours])
    return rows


def compute_bars(phases: Mapping[str, Sequence[Phase]]) -> Any:
    groups: dict[str, list[tuple[str, float, str]]] = {}
    for model, own in phases.items():
        total = sum(phase.total_flops for phase in own) / 1e18
        whole = sum(
            (1 if phase.drop_path_form == "mask" else 1 / (1 - phase.saving)) * phase.total_flops for phase in own
        )
        saved = 1 - 1e18 * total / whole
        entries = groups.setdefault(" + ".join(phase.recipe for phase in own), [])
        entries.append((model, total, f"{total:.3g}" + (f" ({saved:.0%} saved by skipping)" if saved else "")))
    return bars("Training compute", groups, "10^18 floating-point operations", colors_of(list(phases)))
