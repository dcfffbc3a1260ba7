"""Maps of any model of timm as a backbone for segmenters and detectors, named like "timm:resnet50"."""

import copy
from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixlab.core.errors import ConfigError, WeightsError, near_misses
from mixlab.models.backbone import Backbone, Block
from mixlab.models.config import ModelConfig, Preprocessing
from mixlab.models.coscale import CoscaleBlock
from mixlab.models.mixers import Mixer

TIMM = "timm:"
PRETRAINED = "pretrained"
INNER = "network.model."  # in front of the names that timm gives
FINEST, COARSEST, MAPS = 4, 32, 4
OPTIONS = ("drop_path", "image_size", "in_channels", "num_classes", "preprocessing")
# what models that are built for one image size take to see others, each understood by some of them
ANY_SIZE: tuple[dict[str, bool], ...] = ({"strict_img_size": False}, {"dynamic_img_size": True}, {})


class TimmMaps(Backbone):
    """Four maps of a model of timm, from shallow to deep. Images are padded to multiples of the coarsest stride.

    The config says what is built: timm's name, the image size, and in `drop_path` the peak rate; it has one stage per
    map, as wide as the map. There is no classifier.
    """

    def __init__(self, config: ModelConfig) -> None:
        nn.Module.__init__(self)
        self.config, self.class_names = config, ()
        self.network = build_network(config)
        for name in unused(self.network, config):  # a parameter without a gradient would stop distributed training
            self.network.get_parameter(name).requires_grad_(False)
        info = self.network.feature_info
        self.channels, self.strides = tuple(info.channels()), tuple(info.reduction())
        self.coscale = None
        self.readout = nn.Identity()  # type: ignore[assignment]

    def forward(self, image: Tensor) -> list[Tensor]:  # type: ignore[override]
        return self.pyramid(image)

    def pyramid(self, image: Tensor) -> list[Tensor]:
        height, width = image.shape[-2:]
        padded = F.pad(image, (0, -width % COARSEST, 0, -height % COARSEST))
        maps = self.network(padded)
        sides = [(-(-height // stride), -(-width // stride)) for stride in self.strides]
        return [level[..., :rows, :columns] for level, (rows, columns) in zip(maps, sides, strict=True)]

    @property
    def blocks(self) -> dict[str, Block | CoscaleBlock]:
        return {"network": self.network}

    @property
    def token_mixers(self) -> dict[str, list[Mixer]]:
        return {}

    @property
    def layer_order(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Layers as timm groups parameters for the decay of their learning rates; where it does not, the stages."""
        from timm.models import group_parameters

        groups: dict[Any, list[str]] = {}
        if hasattr(self.inner, "group_matcher"):
            groups = group_parameters(self.inner, self.inner.group_matcher())
        else:
            for name, _ in self.inner.named_parameters():
                groups.setdefault(".".join(name.split(".")[:2]), []).append(name)
        return tuple((f"layers.{layer}", tuple(f"{INNER}{name}" for name in own)) for layer, own in groups.items())

    @property
    def no_decay(self) -> frozenset[str]:
        """Vectors, and what timm's model spares itself."""
        spared = {f"{INNER}{name}" for name in getattr(self.inner, "no_weight_decay", set)()}
        return frozenset(name for name, p in self.named_parameters() if p.ndim <= 1 or name in spared)

    @property
    def inner(self) -> Any:
        """timm's model without its head, inside of what picks out the maps."""
        return self.network.model

    def set_activation_checkpointing(self, on: bool = True) -> None:
        self.inner.set_grad_checkpointing(on)

    def reset_classifier(self, num_classes: int) -> None:
        if num_classes:
            raise ConfigError(f"{self.config.name!r} gives maps only; a classifier is timm.create_model's.")


def is_timm(name: object) -> bool:
    return isinstance(name, str) and name.startswith(TIMM)


def timm_maps(
    name: str, options: Mapping[str, Any] | None = None, weights: str | PathLike[str] | None = None
) -> TimmMaps:
    """The backbone "timm:NAME". `weights` is "pretrained" for timm's own, which it downloads, or a file of them."""
    model = TimmMaps(timm_config(name, options or {}))
    if weights is not None:
        fill(model, fspath(weights))
    return model


def timm_config(name: str, options: Mapping[str, Any]) -> ModelConfig:
    """The config of a model of timm: its maps' widths, and how it wants its images."""
    import timm

    own = name.removeprefix(TIMM)
    if not timm.is_model(own):
        raise ConfigError(f"timm has no model {own!r}. {near_misses(own, timm.list_models())}")
    for key in options:
        if key not in OPTIONS:
            raise ConfigError(f"A backbone of timm has no option {key!r}. {near_misses(key, OPTIONS)}")
    with torch.device("meta"):
        plain = timm.create_model(own)
    settings = timm.data.resolve_model_data_config(plain)
    if not hasattr(plain, "forward_intermediates"):
        raise ConfigError(f"timm's {own!r} gives no maps of its stages, so nothing dense can be built on it.")
    channels = options.get("in_channels", 3)
    usual = channels == len(settings["mean"])
    preprocessing = Preprocessing(
        mean=tuple(settings["mean"]) if usual else (0.5,) * channels,
        std=tuple(settings["std"]) if usual else (0.5,) * channels,
        interpolation="bilinear" if settings["interpolation"] == "random" else settings["interpolation"],
        crop=settings["crop_pct"],
    )
    chosen = map_indices(own, [entry["reduction"] for entry in plain.feature_info])
    row = {
        "name": name,
        "family": "timm",
        "dims": [plain.feature_info[index]["num_chs"] for index in chosen],
        "depths": [1] * MAPS,
        "mixers": "identity",
        "image_size": list(settings["input_size"][1:]),
        "preprocessing": preprocessing,
        **options,
        "num_classes": 0,
    }
    return ModelConfig.parse(row)


def map_indices(name: str, strides: list[int]) -> list[int]:
    """Which of timm's features are the four maps: the last ones at strides of 4 to 32, or four at even distances."""
    last = {stride: index for index, stride in enumerate(strides)}
    kinds = [stride for stride in sorted(last) if FINEST <= stride <= COARSEST]
    if len(kinds) == MAPS:
        return [last[stride] for stride in kinds]
    if len(last) == 1 and len(strides) >= MAPS:
        return [(part + 1) * len(strides) // MAPS - 1 for part in range(MAPS)]
    raise ConfigError(
        f"Segmenters and detectors need maps at strides of 4, 8, 16 and 32, or all at one; timm's {name!r} has them at "
        f"{', '.join(map(str, strides))}."
    )


def build_network(config: ModelConfig) -> Any:
    """timm's module that gives the maps, with fresh weights and for any image size."""
    import timm

    own = config.name.removeprefix(TIMM)
    with torch.device("meta"):
        strides = [entry["reduction"] for entry in timm.create_model(own).feature_info]
    options: dict[str, Any] = {"in_chans": config.in_channels, "out_indices": map_indices(own, strides)}
    if config.drop_path.rate:
        options["drop_path_rate"] = config.drop_path.rate
    for size in ({"img_size": tuple(config.image_size)}, {}):
        for more in ANY_SIZE:
            try:
                return timm.create_model(own, features_only=True, feature_cls="getter", **options, **size, **more)
            except TypeError as error:  # an argument that this model does not have
                reason = error
    raise ConfigError(f"timm cannot build {own!r} with {options}: {reason}")


def unused(network: nn.Module, config: ModelConfig) -> list[str]:
    """Parameters that no map depends on, such as a final norm that timm leaves in place."""
    shadow = copy.deepcopy(network).to("meta").train()
    maps = shadow(torch.empty(2, config.in_channels, *config.image_size, device="meta"))
    torch.stack([level.sum() for level in maps]).sum().backward()
    return [name for name, parameter in shadow.named_parameters() if parameter.grad is None]


def fill(model: TimmMaps, weights: str) -> None:
    """Weights of the same model, with or without a classifier; all that the maps need must be there."""
    state = read_state(model.config.name.removeprefix(TIMM), weights)
    own = model.inner.state_dict()
    wrong = sorted(key for key in own if key not in state or state[key].shape != own[key].shape)
    if wrong:
        raise WeightsError(
            f"{weights} does not fit {model.config.name!r}: {len(wrong)} tensors are missing or mis-shaped, such as "
            f"{wrong[0]!r}."
        )
    model.inner.load_state_dict({key: state[key] for key in own})


def read_state(name: str, weights: str) -> Mapping[str, Tensor]:
    import timm
    from timm.models import load_state_dict

    if weights == PRETRAINED:
        try:
            state: Mapping[str, Tensor] = timm.create_model(name, pretrained=True).state_dict()
        except Exception as error:  # no network, a full cache, a name without weights
            raise WeightsError(f"timm has no weights for {name!r} here: {error}") from error
        return state
    if not Path(weights).is_file():
        raise WeightsError(f"The weight file {weights} for timm's {name!r} does not exist.")
    try:
        state = load_state_dict(weights, use_ema=True, weights_only=True)
    except Exception as error:  # whatever a broken file makes of it
        raise WeightsError(f"{weights} holds no weights that timm can read: {error}") from error
    return state
