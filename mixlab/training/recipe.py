"""How a model is trained: plain data in `configs/recipes` or a user's file, a checked frozen dataclass out."""

import copy
import fnmatch
import functools
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from mixlab.core.choices import make, plain
from mixlab.core.errors import ConfigError, near_misses, require
from mixlab.dense.detector import DeformableOptions, DetectorConfig


def check_train_splits(names: Sequence[str]) -> None:
    given = list(names)
    right = bool(given) and len(set(given)) == len(given) and set(given) <= {"train", "val"}
    require(right, f"train_splits of train, val or both; got {' '.join(given) or 'none'}.")


def inside(*shares: float) -> bool:
    return all(0 <= share < 1 for share in shares)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The learning rate is `lr * batch_size / lr_divisor`, or `lr` itself without a divisor.

    `layer_decay` multiplies it once per layer that lies between a parameter and the head, `backbone_scale` once in all
    layers but the head. `decay_filters`: weight decay also touches the positions, frequencies, decay and shift of
    implicit filters, which it spares otherwise. `layer_groups` says what counts as a layer for `layer_decay`: a block
    ("blocks"), or one of ConvNeXt's groups for four stages ("convnext"): the stem, the first two stages, thirds of the
    third, the last one. `rate_factors` are pairs of a shell pattern for parameter names and what their rate is
    multiplied with.
    """

    name: Literal["adamw", "lamb", "sgd"] = "adamw"
    lr: float
    lr_divisor: int | None = None
    weight_decay: float = 0.05
    betas: tuple[float, ...] = (0.9, 0.999)  # momentum alone for sgd: the first
    eps: float = 1e-8
    clip_norm: float | None = None
    layer_decay: float = 1.0
    backbone_scale: float = 1.0
    decay_filters: bool = False
    layer_groups: Literal["blocks", "convnext"] = "blocks"
    rate_factors: tuple[tuple[Any, ...], ...] = ()

    def __post_init__(self) -> None:
        require(0 < self.lr < math.inf, f"a learning rate above 0; got {self.lr}.")
        require(self.lr_divisor is None or self.lr_divisor > 0, f"an lr_divisor above 0; got {self.lr_divisor}.")
        require(0 <= self.weight_decay < math.inf, f"a weight_decay of 0 or more; got {self.weight_decay}.")
        require(len(self.betas) == 2 and inside(*self.betas), f"two betas in [0, 1); got {list(self.betas)}.")
        require(0 < self.eps < 1, f"an optimizer eps in (0, 1); got {self.eps}.")
        require(self.clip_norm is None or self.clip_norm > 0, f"a clip_norm above 0, or none; got {self.clip_norm}.")
        require(0 < self.layer_decay <= 1, f"a layer_decay in (0, 1]; got {self.layer_decay}.")
        require(0 <= self.backbone_scale <= 1, f"a backbone_scale in [0, 1]; got {self.backbone_scale}.")
        for pair in self.rate_factors:
            right = len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], int | float) and pair[1] >= 0
            require(right, f"rate_factors such as [['*.sampling_offsets.*', 0.1]]; got {list(pair)}.")


Optimiser = Optimizer  # the name until 0.1.0


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A length in `epochs` or `updates`, the warm-up included; the cool-down comes on top of it.

    "polynomial" falls to `min_lr` with a `power`; "step" multiplies the rate with `factor` at each of the `milestones`,
    which are in the unit of the length. With `warmup_prefix` a cosine or polynomial begins after the warm-up; without,
    it begins with the first update and the warm-up hides its beginning.
    """

    name: Literal["cosine", "constant", "polynomial", "step"] = "cosine"
    epochs: int | None = None
    updates: int | None = None
    warmup_epochs: int = 0
    warmup_updates: int = 0
    warmup_lr: float = 1e-6
    warmup_prefix: bool = True
    min_lr: float = 1e-6
    cooldown_epochs: int = 0
    power: float = 1.0
    milestones: tuple[int, ...] = ()
    factor: float = 0.1

    def __post_init__(self) -> None:
        require((self.epochs is None) != (self.updates is None), "either epochs or updates in the schedule.")
        length, unit = (self.updates, "updates") if self.epochs is None else (self.epochs, "epochs")
        warmup = self.warmup_updates if self.epochs is None else self.warmup_epochs
        require(length is not None and length >= 1, f"a schedule of 1 or more {unit}; got {length}.")
        require(not (self.warmup_epochs and self.warmup_updates), "a warm-up in epochs or in updates, not both.")
        require(warmup <= (length or 0), f"warmup_{unit} within the {length} {unit} of the schedule; got {warmup}.")
        counts = (self.warmup_epochs, self.warmup_updates, self.cooldown_epochs)
        require(min(counts) >= 0, f"a warm-up and a cool-down of 0 or more; got {counts}.")
        rates = (self.warmup_lr, self.min_lr)
        require(all(0 <= rate < math.inf for rate in rates), f"warmup_lr and min_lr of 0 or more; got {rates}.")
        rising = list(self.milestones) == sorted(set(self.milestones)) and all(at > 0 for at in self.milestones)
        require(rising, f"rising milestones above 0; got {list(self.milestones)}.")
        require(bool(self.milestones) or self.name != "step", "milestones for the schedule 'step'.")
        within = not self.milestones or self.milestones[-1] < (length or 0)
        require(within, f"milestones within the {length} {unit} of the schedule; got {list(self.milestones)}.")
        require(self.power > 0 and 0 < self.factor <= 1, f"a power above 0 and a factor in (0, 1]; got {self}.")


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """What happens to training images. `randaugment` is in timm's words.

    `crop`: a random part of the image ("random_resized", with `scale` and `ratio`), the whole image squeezed into the
    size ("squash"), resized and cropped at the center as in evaluation ("center"), padded by `padding` of the side
    and cropped at random ("padded"), or resized by a random factor from `scale` and cropped at random ("rescaled").
    `three_augment` is DeiT III's: grey, solarised or blurred with a sigma of 0.1 to 2, each with the same chance.
    `jitter` is how far brightness, contrast, saturation and hue may move.
    """

    crop: Literal["random_resized", "squash", "center", "padded", "rescaled"] = "random_resized"
    scale: tuple[float, ...] = (0.08, 1.0)
    ratio: tuple[float, ...] = (3 / 4, 4 / 3)
    padding: float = 0.125
    flip: float = 0.5
    interpolation: Literal["bicubic", "bilinear", "nearest", "random"] = "bicubic"
    randaugment: str | None = None  # such as "rand-m9-mstd0.5-inc1"
    three_augment: bool = False
    jitter: tuple[float, ...] | None = None
    jitter_probability: float = 1.0
    erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_probability: float = 1.0
    switch_probability: float = 0.5
    label_smoothing: float = 0.0
    repeats: int = 1  # copies of a sample in an epoch, each augmented anew; the epoch stays as long

    def __post_init__(self) -> None:
        for name in (*("flip", "jitter_probability", "erasing", "mix_probability"), "switch_probability"):
            require(0 <= getattr(self, name) <= 1, f"a probability for {name}; got {getattr(self, name)}.")
        require(inside(self.label_smoothing), f"a label_smoothing in [0, 1); got {self.label_smoothing}.")
        for name in ("scale", "ratio"):
            span = getattr(self, name)
            require(len(span) == 2 and 0 < span[0] <= span[1], f"a rising pair for {name}; got {list(span)}.")
        require(self.crop == "rescaled" or self.scale[1] <= 1, f"a scale up to 1; got {list(self.scale)}.")
        require(0 <= self.padding <= 1, f"a padding between 0 and 1 of the side; got {self.padding}.")
        require(self.mixup >= 0 and self.cutmix >= 0, f"mixup, cutmix of 0 or more; got {self.mixup}, {self.cutmix}.")
        require(self.jitter is None or len(self.jitter) == 4, f"four numbers for jitter; got {self.jitter}.")
        randaugment = self.randaugment is None or self.randaugment.startswith("rand-")
        require(randaugment, f"a randaugment such as 'rand-m9-mstd0.5-inc1'; got {self.randaugment!r}.")
        require(not (self.randaugment and self.three_augment), "randaugment or three_augment, not both.")
        require(self.repeats >= 1, f"repeats of 1 or more; got {self.repeats}.")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What a transfer tries on the validation split before it trains with the best learning rate."""

    lr: tuple[float, ...]
    seeds: int = 5

    def __post_init__(self) -> None:
        require(bool(self.lr) and min(self.lr) > 0, f"learning rates above 0 to try; got {list(self.lr)}.")
        require(self.seeds >= 1, f"seeds of 1 or more; got {self.seeds}.")


@dataclass(frozen=True, kw_only=True)
class Segmentation:
    """The decoder on a backbone's maps and how whole images are evaluated.

    `mode`: images as a whole, a window as large as a training crop that slides by `stride`, or several `scales` and a
    `flip`. The auxiliary head reads map number `auxiliary_map`, counted from 0.
    """

    decoder: Literal["upernet", "linear"] = "upernet"
    width: int = 384
    auxiliary_weight: float = 0.4
    auxiliary_width: int = 384
    auxiliary_map: int = 2
    mode: Literal["whole", "sliding", "multiscale"] = "whole"
    stride: int = 341
    scales: tuple[float, ...] = (0.75, 1.0, 1.25, 1.5, 1.75)
    flip: bool = True
    norms: bool = False
    balance: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Detection:
    """Images in training: the shorter side is drawn from `shorter`, the longer one is at most the detector's `longer`.

    `crop` is the chance of a random part, as for DETR.
    """

    shorter: tuple[int, ...] = (800,)
    crop: float = 0.0

    def __post_init__(self) -> None:
        given = bool(self.shorter) and min(self.shorter) >= 1
        require(given, f"shorter sides of 1 px or more; got {list(self.shorter)}.")
        require(0 <= self.crop <= 1, f"a probability for the crop; got {self.crop}.")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything about a training run but the model and the data. None means the model's own value."""

    name: str
    source: str = ""  # paper and table
    task: Literal["classification", "segmentation", "detection"] = "classification"
    optimizer: Optimizer
    schedule: Schedule
    augmentation: Augmentation = Augmentation()
    sweep: Sweep | None = None
    segmentation: Segmentation | None = None
    detection: Detection | None = None
    detector: DetectorConfig | None = None  # its number of classes is the data's
    batch_size: int  # of all processes and accumulated steps together
    train_splits: tuple[Literal["train", "val"], ...] = ("train",)  # with "val" in it, the test split is evaluated
    image_size: int | None = None
    eval_crop: float | None = None
    eval_crop_mode: Literal["center", "squash"] | None = None
    eval_image_size: int | None = None
    precision: Literal["float32", "tf32", "bf16", "float16"] = "float32"
    ema_decay: float | None = None
    drop_path: float | None = None
    drop_path_schedule: Literal["ramp", "constant"] | None = None
    head_dropout: float | None = None
    model: dict[str, Any] = field(default_factory=dict)  # options of `create_model` for one that starts afresh
    train_only: Literal["all", "head"] = "all"
    evaluate_every: int = 1  # epochs; the last one is always evaluated

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, f"a batch_size of 1 or more; got {self.batch_size}.")
        check_train_splits(self.train_splits)
        require(self.evaluate_every >= 1, f"an evaluate_every of 1 epoch or more; got {self.evaluate_every}.")
        require(self.ema_decay is None or 0 < self.ema_decay < 1, f"an ema_decay in (0, 1); got {self.ema_decay}.")
        require(self.eval_crop is None or 0 < self.eval_crop <= 1, f"an eval_crop in (0, 1]; got {self.eval_crop}.")
        for name in ("drop_path", "head_dropout"):
            require(inside(getattr(self, name) or 0.0), f"a {name} in [0, 1); got {getattr(self, name)}.")
        for name in ("image_size", "eval_image_size"):
            side = getattr(self, name)
            require(side is None or side >= 1, f"an {name} of 1 px or more; got {side}.")

    def plain(self) -> dict[str, Any]:
        """JSON- and TOML-ready data that `parse_recipe` turns back into this recipe."""
        return given(plain(self))


PARTS: dict[str, type] = {
    "optimizer": Optimizer,
    "schedule": Schedule,
    "augmentation": Augmentation,
    "sweep": Sweep,
    "segmentation": Segmentation,
    "detection": Detection,
    "detector": DetectorConfig,
    "detector.deformable": DeformableOptions,
}
MODEL = "model"
RESPELLED = {"optimiser": "optimizer"}  # sections under the names that they had in 0.1.0, which files may still use
RESPELLED_CROPS = {"centre": "center"}
ALTERNATIVES = [("epochs", "updates"), ("warmup_epochs", "warmup_updates")]  # of a schedule: one replaces the other


def given(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without what is None, at every level: TOML has no word for it."""
    kept = {key: value for key, value in row.items() if value is not None}
    return {key: given(value) if isinstance(value, Mapping) else value for key, value in kept.items()}


def respelled(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe, or changes of one, in the spelling of now: sections and dotted keys, and the word for a crop."""
    renamed = {}
    for key, value in row.items():
        section, dot, rest = key.partition(".")
        renamed[f"{RESPELLED.get(section, section)}{dot}{rest}"] = value
    if renamed.get("augmentation.crop") in RESPELLED_CROPS:
        renamed["augmentation.crop"] = RESPELLED_CROPS[renamed["augmentation.crop"]]
    augmentation = renamed.get("augmentation")
    if isinstance(augmentation, Mapping) and augmentation.get("crop") in RESPELLED_CROPS:
        renamed["augmentation"] = {**augmentation, "crop": RESPELLED_CROPS[augmentation["crop"]]}
    return renamed


def parse_recipe(row: Mapping[str, Any], what: str) -> Recipe:
    recipe: Recipe = make(Recipe, respelled(row), what)
    return recipe


@functools.cache
def recipe_rows() -> dict[str, dict[str, Any]]:
    """The published recipes as plain data: one file each, named as its file."""
    found = {}
    for file in sorted((resources.files("mixlab") / "configs" / "recipes").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            found[file.name.removesuffix(".toml")] = tomllib.loads(file.read_text(encoding="utf-8"))
    return found


def list_recipes(pattern: str = "*") -> list[str]:
    return sorted(fnmatch.filter(recipe_rows(), pattern))


def load_recipe(name: str | PathLike[str], *, model: str = "", changes: Mapping[str, Any] | None = None) -> Recipe:
    """A recipe by name or from a TOML file, with its entries for a model and then `changes` ("optimizer.lr": 1e-3)."""
    published = str(name) in recipe_rows()
    if not published and Path(name).suffix != ".toml":
        hint = near_misses(str(name), recipe_rows())
        raise ConfigError(f"Unknown recipe {str(name)!r}. {hint} Or give a file that ends in .toml.")
    what = f"recipe {str(name)!r}"
    row = resolve(recipe_rows()[str(name)] if published else read_recipe(Path(name)), model, what)
    merge(row, changes or {}, what)
    return parse_recipe({"name": Path(name).stem, **row}, what)


def read_recipe(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The recipe file {path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from error


def resolve(file: Mapping[str, Any], model: str, what: str) -> dict[str, Any]:
    """What a file says for one model: its `base`'s row, its own entries, then those of `models` that fit the name."""
    own = copy.deepcopy(dict(file))
    base, models = own.pop("base", None), own.pop("models", {})
    if base is not None and (not isinstance(base, str) or base not in recipe_rows()):
        raise ConfigError(f"Unknown base {base!r} of {what}. {near_misses(str(base), recipe_rows())}")
    if not isinstance(models, dict) or not all(isinstance(entries, dict) for entries in models.values()):
        raise ConfigError(f"The models of {what} must be tables [models.PATTERN] with keys of a recipe; got {models}.")
    row = {} if base is None else resolve(recipe_rows()[base], model, f"recipe {base!r}")
    merge(row, own, what)
    for pattern, entries in models.items():
        changed = copy.deepcopy(row)
        merge(changed, entries, f"{what} for {pattern!r}")  # a wrong key is an error for every model
        if fnmatch.fnmatch(model, pattern):
            row = changed
    return row


def merge(row: dict[str, Any], changes: Mapping[str, Any], what: str) -> None:
    """Set nested or dotted keys in a row."""
    values = respelled(flat(changes))
    for pair in ALTERNATIVES:
        named = [name for name in pair if f"schedule.{name}" in values]
        if named and pair[0] == "epochs" and "schedule.milestones" not in values:
            refuse_other_unit(row, named[0], what)
        if len(named) == 1 and isinstance(row.get("schedule"), dict):
            row["schedule"] = {key: value for key, value in row["schedule"].items() if key not in pair}
    for key, value in values.items():
        put(row, key, value, what)


def refuse_other_unit(row: Mapping[str, Any], unit: str, what: str) -> None:
    """Milestones are in the unit of the length: another unit needs other milestones."""
    schedule = row.get("schedule")
    if isinstance(schedule, dict) and schedule.get("milestones") and schedule.get(unit) is None:
        raise ConfigError(
            f"The milestones {list(schedule['milestones'])} of {what} are not {unit}: give schedule.milestones too, "
            f"such as --set 'schedule.milestones=[8, 11]'."
        )


def flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}; the options of a model stay together."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        whole = not isinstance(value, Mapping) or prefix + key == MODEL
        found |= {prefix + key: value} if whole else flat(value, f"{prefix}{key}.")
    return found


def put(row: dict[str, Any], key: str, value: Any, what: str) -> None:
    """Set a dotted key; "none" takes an optional value away."""
    part, dot, last = key.rpartition(".")
    known = [entry.name for entry in fields(PARTS.get(part, Recipe))]
    if dot and part not in PARTS:
        raise ConfigError(f"Unknown key {key!r} of {what}. {near_misses(part, [*PARTS, *known])}")
    if last not in known:
        raise ConfigError(f"Unknown key {key!r} of {what}. {near_misses(last, known)}")
    place: Any = row
    for name in part.split(".") if dot else ():
        if place.get(name) is None:
            place[name] = {}
        place = place[name]
        if not isinstance(place, dict):
            raise ConfigError(f"{part} of {what} must be a table with keys such as {last}; got {place!r}.")
    if key == MODEL and isinstance(value, Mapping):
        value = {**place.get(MODEL, {}), **value}
    place[last] = None if value == "none" else value
