"""The description of one model: plain data in, a checked frozen dataclass out."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

from mixlab.core.choices import Choice, make, plain
from mixlab.core.errors import ConfigError, require
from mixlab.models.coscale import Coscale
from mixlab.models.heads import HEADS, POOLS, HeadChoice, PoolChoice
from mixlab.models.layers import ACTIVATIONS, NORMS, ActivationChoice, NormChoice, ScalingChoice, StochasticDepth
from mixlab.models.mixers import MixerChoice
from mixlab.models.stems import STEMS, StemChoice

MIN_SIDE = 32  # pixels; below it a stride of 32 leaves no token
TWELFTHS = 12  # the depth in units of which a single stage's pyramid is told
INHERITED = ("activation", "bias")  # options of a mixer that are the model's own unless given
PER_STAGE = {"mlp_ratio": 4.0, "branch_scale": "none", "class_tokens": 0}  # and what an absent one means


@dataclass(frozen=True)
class Reported:
    """One row of a paper's table."""

    table: str
    image_size: int = 224
    params: float | None = None  # millions
    frozen: float | None = None  # millions
    macs: float | None = None  # GMACs
    top1: float | None = None  # percent, ImageNet-1K
    pretraining: str | None = None  # the larger dataset in front of ImageNet-1K


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes the tensor that the weights were trained on."""

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    interpolation: Literal["bicubic", "bilinear", "nearest"] = "bicubic"
    crop: float = 1.0  # the share of the resized image's side that the center crop keeps
    crop_mode: Literal["center", "squash"] = "center"  # resized in its proportions, or squeezed into the shape first
    image_size: int | tuple[int, ...] | None = None  # to evaluate at, if it is not the size the model is built for

    def __post_init__(self) -> None:
        if self.image_size is not None and min(parse_image_size(self.image_size)) < MIN_SIDE:
            raise ConfigError(f"Images to evaluate on need sides of {MIN_SIDE} px or more; got {self.image_size}.")
        require(
            all(std > 0 for std in self.std) and 0 < self.crop <= 1, f"a std above 0, a crop in (0, 1]; got {self}."
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything that decides a model's architecture, and what goes with its weights."""

    name: str
    family: str
    paper: str = ""
    dims: tuple[int, ...]
    depths: tuple[int, ...]
    mixers: tuple[MixerChoice, ...]
    mlp_ratio: tuple[float, ...]
    branch_scale: tuple[ScalingChoice, ...]
    class_tokens: tuple[int, ...]
    downsample: tuple[StemChoice, ...]  # one entry per step between two stages
    image_size: tuple[int, ...] = (224, 224)  # for what depends on the grid: position tables, random matrices
    in_channels: int = 3
    num_classes: int = 1000
    stem: StemChoice = STEMS.parse("overlapping")
    norm: NormChoice = NORMS.parse("layer")
    activation: ActivationChoice = ACTIVATIONS.parse("gelu")
    position_embedding: bool = False  # a learned table on the first stage's tokens
    class_position: bool = False  # the table has entries for the class tokens too
    coscale: Coscale | None = None  # parallel blocks behind the last stage
    channel_mlp: bool | None = None  # None: a block has an MLP unless its mixer mixes channels itself
    bias: bool = True  # of norms, linear layers and convolutions inside the blocks
    drop_path: StochasticDepth = StochasticDepth()
    pool: PoolChoice = POOLS.parse("mean")
    final_norm: Literal["before_pool", "after_pool"] = "before_pool"
    final_norm_eps: float = 1e-6
    head: HeadChoice = HEADS.parse("linear")
    init: str = "truncated_normal"
    preprocessing: Preprocessing = Preprocessing()
    taps: tuple[int, ...] = ()  # pyramid maps of a single stage: behind how many twelfths of its blocks
    recipe: str = ""  # the one to train it with
    reported: tuple[Reported, ...] = ()

    @classmethod
    def parse(cls, row: Mapping[str, Any]) -> Self:
        """Check plain data; one value stands for all stages, a number for (side, side) or for a drop rate."""
        row = dict(row)
        if not isinstance(row.get("dims"), (list, tuple)):
            raise ConfigError(f"dims must be a list of channel counts, one per stage; got {row.get('dims')!r}.")
        stages = len(row["dims"])
        for field, default in PER_STAGE.items():
            row[field] = spread(row.get(field, default), stages)
        row["mixers"] = spread(row.get("mixers"), stages)
        row["downsample"] = spread(row.get("downsample", "overlapping"), stages - 1)
        if "image_size" in row:
            row["image_size"] = parse_image_size(row["image_size"])
        if isinstance(row.get("drop_path"), (int, float)):
            row["drop_path"] = {"rate": row["drop_path"]}
        given = row.get("preprocessing", {})
        if row.get("in_channels", 3) != 3 and isinstance(given, Mapping):
            halves = (0.5,) * row["in_channels"] if isinstance(row["in_channels"], int) else ()
            row["preprocessing"] = {"mean": halves, "std": halves, **given}
        return make(cls, row, "the model")

    def __post_init__(self) -> None:
        self.check_stages()
        self.check_images()
        if self.coscale is not None:
            self.check_coscale(self.coscale.scales)
            require(self.channel_mlp is not False, "channel_mlp for coscale: its parallel blocks share an MLP.")
        if self.num_classes < 0:
            raise ConfigError(f"num_classes must be 0 (features only) or more; got {self.num_classes}.")
        if not 0 <= self.drop_path.rate < 1:
            raise ConfigError(f"The drop_path rate must be at least 0 and below 1; got {self.drop_path.rate}.")
        if self.pool.name == "class_token" and not self.class_tokens[-1]:
            raise ConfigError("pool 'class_token' needs class_tokens of 1 or more in the last stage.")
        self.check_taps()

    def check_stages(self) -> None:
        stages = len(self.dims)
        if not stages or min(self.dims) < 1:
            raise ConfigError(f"dims must be channel counts of 1 or more, one per stage; got {list(self.dims)}.")
        for field in ("depths", "mixers", "downsample", *PER_STAGE):
            count, wanted = len(getattr(self, field)), stages - (field == "downsample")
            if count != wanted:
                where = "step between two stages" if field == "downsample" else "stage"
                raise ConfigError(
                    f"{field} of {self.name!r} needs {wanted} entries, one per {where} (dims has {stages}); "
                    f"got {count}."
                )
        if min(self.depths) < 1 or not all(0 < ratio < 1000 for ratio in self.mlp_ratio) or min(self.class_tokens) < 0:
            raise ConfigError(
                f"Each stage needs a depth of 1 or more, an mlp_ratio above 0 and class_tokens of 0 or more; got "
                f"depths {list(self.depths)}, mlp_ratio {list(self.mlp_ratio)}, "
                f"class_tokens {list(self.class_tokens)}."
            )

    def check_taps(self) -> None:
        rising = all(early <= late for early, late in itertools.pairwise(self.taps))
        inside = all(1 <= tap <= TWELFTHS for tap in self.taps)
        require(
            rising and inside, f"rising taps from 1 to {TWELFTHS}, in twelfths of the depth; got {list(self.taps)}."
        )
        require(not self.taps or len(self.dims) == 1, f"a single stage for taps; {self.name!r} has {len(self.dims)}.")

    def check_coscale(self, scales: int) -> None:
        for field in ("dims", "class_tokens", "mlp_ratio"):
            values = getattr(self, field)[-scales:]
            require(
                len(values) == scales and all(value == values[0] for value in values),
                f"the same {field} in the last {scales} stages for coscale; got {list(getattr(self, field))}.",
            )

    def check_images(self) -> None:
        if min(self.image_size) < MIN_SIDE:
            raise ConfigError(f"image_size must be {MIN_SIDE} px or more on each side; got {self.image_size}.")
        if self.in_channels < 1:
            raise ConfigError(f"in_channels must be 1 or more; got {self.in_channels}.")
        if not len(self.preprocessing.mean) == len(self.preprocessing.std) == self.in_channels:
            raise ConfigError(
                f"preprocessing needs a mean and a std for each of the {self.in_channels} input channels; got "
                f"{len(self.preprocessing.mean)} and {len(self.preprocessing.std)}."
            )

    @property
    def evaluation_size(self) -> tuple[int, int]:
        """Return height and width of the images that this model is evaluated on."""
        return parse_image_size(self.preprocessing.image_size or self.image_size)

    def plain(self) -> dict[str, Any]:
        """Return JSON-ready data that `parse` turns back into this config."""
        return plain(self)

    def mixer(self, stage: int) -> Choice:
        """Return the mixer of a stage, with the model's activation and bias where it names none."""
        return self.inherit(self.mixers[stage])

    def inherit(self, choice: Choice) -> Choice:
        """Return a choice whose options take the model's values where they say nothing."""
        names = [field.name for field in fields(choice.options) if field.name in INHERITED]
        inherited = {name: getattr(self, name) for name in names if getattr(choice.options, name) is None}
        return replace(choice, options=replace(choice.options, **inherited))


def spread(entry: Any, count: int) -> Any:
    """Repeat an entry for all stages, unless it is a list already."""
    return entry if isinstance(entry, (list, tuple)) else (entry,) * count


def override(row: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with changes on top. A mapping without a name changes options of the current choice."""
    merged = dict(row)
    channels = {key: changes[key] for key in ("in_channels",) if key in changes}  # preprocessing follows them
    for key, value in changes.items():
        if isinstance(value, Mapping) and "name" not in value:
            current = ModelConfig.parse({**row, **channels}).plain().get(key)
            value = {**current, **value} if isinstance(current, Mapping) else value
        merged[key] = value
    prepared, changed = merged.get("preprocessing"), changes.get("preprocessing", {})
    if "image_size" in changes and isinstance(prepared, Mapping) and "image_size" not in changed:
        merged["preprocessing"] = {**prepared, "image_size": None}  # the old one went with the old size
    return merged


def parse_image_size(value: Any) -> tuple[int, int]:
    """Return (height, width) of an image size that is given as such or as one side."""
    sides = (value, value) if isinstance(value, int) else value
    whole = isinstance(sides, (list, tuple)) and all(type(side) is int and side >= 1 for side in sides)
    if not whole or len(sides) != 2:
        raise ConfigError(f"An image size is a side or (height, width) in whole pixels; got {value!r}.")
    return sides[0], sides[1]
