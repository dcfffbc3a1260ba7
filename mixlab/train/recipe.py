"""How a model is trained: plain data in `configs/recipes` or a user's file, a checked frozen dataclass out."""

import copy
import fnmatch
import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from mixlab.choices import make, plain
from mixlab.errors import ConfigError, near_misses, require


@dataclass(frozen=True, kw_only=True)
class Optimiser:
    """The learning rate is `lr * batch_size / lr_divisor`, or `lr` itself without a divisor.

    `layer_decay` multiplies it once per layer that lies between a parameter and the head.
    """

    name: Literal["adamw", "lamb", "sgd"] = "adamw"
    lr: float
    lr_divisor: int | None = None
    weight_decay: float = 0.05
    betas: tuple[float, ...] = (0.9, 0.999)  # momentum alone for sgd: the first
    eps: float = 1e-8
    clip_norm: float | None = None
    layer_decay: float = 1.0

    def __post_init__(self) -> None:
        require(self.lr > 0, f"a learning rate above 0; got {self.lr}.")
        require(self.lr_divisor is None or self.lr_divisor > 0, f"an lr_divisor above 0; got {self.lr_divisor}.")
        require(0 < self.layer_decay <= 1, f"a layer_decay in (0, 1]; got {self.layer_decay}.")
        require(len(self.betas) == 2, f"two betas; got {self.betas}.")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A length in `epochs` or `updates`, the warm-up included; the cool-down comes on top of it."""

    name: Literal["cosine", "constant"] = "cosine"
    epochs: int | None = None
    updates: int | None = None
    warmup_epochs: int = 0
    warmup_updates: int = 0
    warmup_lr: float = 1e-6
    min_lr: float = 1e-6
    cooldown_epochs: int = 0

    def __post_init__(self) -> None:
        require((self.epochs is None) != (self.updates is None), "either epochs or updates in the schedule.")
        require((self.epochs or self.updates or 0) >= 1, f"a schedule of one epoch or update or more; got {self}.")
        require(not (self.warmup_epochs and self.warmup_updates), "a warm-up in epochs or in updates, not both.")
        require(self.epochs is None or self.warmup_epochs <= self.epochs, f"a warm-up within the epochs; got {self}.")


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """What happens to training images. `randaugment` and `jitter` are in timm's words.

    `crop`: a random part of the image ("random_resized", with `scale` and `ratio`), the whole image squeezed into the
    size ("squash"), resized and cropped at the centre as in evaluation ("centre"), or padded by `padding` of the side
    and cropped at random ("padded").
    """

    crop: Literal["random_resized", "squash", "centre", "padded"] = "random_resized"
    scale: tuple[float, ...] = (0.08, 1.0)
    ratio: tuple[float, ...] = (3 / 4, 4 / 3)
    padding: float = 0.125
    flip: float = 0.5
    interpolation: Literal["bicubic", "bilinear", "nearest", "random"] = "bicubic"
    randaugment: str | None = None  # such as "rand-m9-mstd0.5-inc1"
    three_augment: bool = False
    jitter: tuple[float, ...] | None = None
    erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_probability: float = 1.0
    switch_probability: float = 0.5
    label_smoothing: float = 0.0
    repeats: int = 1  # copies of a sample in an epoch, each augmented anew; the epoch stays as long

    def __post_init__(self) -> None:
        shares = (self.flip, self.erasing, self.mix_probability, self.switch_probability, self.label_smoothing)
        require(all(0 <= share <= 1 for share in shares), f"probabilities between 0 and 1; got {self}.")
        require(self.repeats >= 1, f"repeats of 1 or more; got {self.repeats}.")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything about a training run but the model and the data. None means the model's own value.

    `models` holds changes for models by shell pattern of their names, in the order in which they apply.
    """

    name: str
    source: str = ""  # paper and table
    task: Literal["classification", "segmentation", "detection"] = "classification"
    optimiser: Optimiser
    schedule: Schedule
    augmentation: Augmentation = Augmentation()
    batch_size: int  # of all processes and accumulated steps together
    image_size: int | None = None
    eval_crop: float | None = None
    eval_image_size: int | None = None
    precision: Literal["float32", "bf16", "float16"] = "float32"
    ema_decay: float | None = None
    drop_path: float | None = None
    head_dropout: float | None = None
    train_only: Literal["all", "head"] = "all"
    models: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, f"a batch_size of 1 or more; got {self.batch_size}.")
        require(self.ema_decay is None or 0 < self.ema_decay < 1, f"an ema_decay in (0, 1); got {self.ema_decay}.")

    def plain(self) -> dict[str, Any]:
        """JSON- and TOML-ready data that `parse_recipe` turns back into this recipe."""
        return plain(self)


def parse_recipe(row: Mapping[str, Any], what: str) -> Recipe:
    recipe: Recipe = make(Recipe, row, what)
    return recipe


@functools.cache
def recipe_rows() -> dict[str, dict[str, Any]]:
    """The published recipes as plain data: one file each, named as its file."""
    found = {}
    for file in sorted((resources.files("mixlab") / "configs" / "recipes").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            name = file.name.removesuffix(".toml")
            found[name] = {"name": name, **tomllib.loads(file.read_text(encoding="utf-8"))}
    return found


def list_recipes(pattern: str = "*") -> list[str]:
    return sorted(fnmatch.filter(recipe_rows(), pattern))


def load_recipe(name: str | PathLike[str], *, model: str = "", changes: Mapping[str, Any] | None = None) -> Recipe:
    """A recipe by name or from a TOML file, with its entries for a model and then `changes` ("optimiser.lr": 1e-3)."""
    if str(name) in recipe_rows():
        row = copy.deepcopy(recipe_rows()[str(name)])
    elif Path(name).suffix == ".toml":
        row = read_recipe(Path(name))
    else:
        raise ConfigError(
            f"Unknown recipe {str(name)!r}. {near_misses(str(name), recipe_rows())} Or give a file that ends in .toml."
        )
    what = f"recipe {row['name']!r}"
    for pattern, own in parse_recipe(row, what).models.items():
        if fnmatch.fnmatch(model, pattern):
            for key, value in flat(own).items():
                put(row, key, value, what)
    for key, value in (changes or {}).items():
        put(row, key, value, what)
    return parse_recipe(row, what)


def read_recipe(path: Path) -> dict[str, Any]:
    try:
        return {"name": path.stem, **tomllib.loads(path.read_text(encoding="utf-8"))}
    except OSError as error:
        raise ConfigError(f"The recipe file {path} cannot be read: {error.strerror}.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from error


def flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def put(row: dict[str, Any], key: str, value: Any, what: str) -> None:
    """Set a dotted key; "none" takes an optional value away."""
    *path, last = key.split(".")
    place, known = row, [entry.name for entry in fields(Recipe)]
    for part in path:
        if part not in PARTS:
            raise ConfigError(f"Unknown key {key!r} of {what}. {near_misses(part, [*PARTS, *known])}")
        place, known = place.setdefault(part, {}), [entry.name for entry in fields(PARTS[part])]
    if last not in known:
        raise ConfigError(f"Unknown key {key!r} of {what}. {near_misses(last, known)}")
    if last in LENGTHS:  # the one replaces the other
        for other in LENGTHS:
            place.pop(other, None)
    place[last] = None if value == "none" else value


PARTS: dict[str, type] = {"optimiser": Optimiser, "schedule": Schedule, "augmentation": Augmentation}
LENGTHS = ("epochs", "updates")
