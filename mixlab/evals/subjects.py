"""What an instrument looks at: a Mixlab model by name, a weight file, or a model of timm, all behind one face.

caformer_s18                     fresh weights
caformer_s18=weights.pth         a named model with weights in any known layout
run/final.safetensors            a file that `save_weights` or `mixlab train` wrote
timm:resnet50                    timm's model, fresh weights
timm:resnet50=weights.pth        with weights from a file, read without executing anything
timm:resnet50=pretrained         with timm's own weights, which it downloads
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mixlab.core.errors import ConfigError, ImageError, WeightsError, near_misses
from mixlab.data.transforms import Transform, eval_transform
from mixlab.evals.timm_places import check_module, maps_at, place_names
from mixlab.models.backbone import Backbone
from mixlab.models.config import Preprocessing, parse_image_size
from mixlab.models.model import Model
from mixlab.models.zoo import create_model, list_models

TIMM = "timm:"
PRETRAINED = "pretrained"
Source = str | PathLike[str] | Model


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A classifier in eval mode, and what has to be known to feed it."""

    name: str
    model: nn.Module  # scores (B, num_classes) of normalized images (B, in_channels, H, W)
    image_size: tuple[int, int]
    in_channels: int
    num_classes: int
    preprocessing: Preprocessing
    class_names: tuple[str, ...] = ()
    trained: bool

    def transform(self, image_size: int | tuple[int, int] | None = None, crop: float | None = None) -> Transform:
        """From a PIL image to the tensor this model takes; by default at its own size and crop."""
        size = self.image_size if image_size is None else parse_image_size(image_size)
        return eval_transform(size, self.preprocessing, self.in_channels, crop)

    @property
    def intermediate_names(self) -> tuple[str, ...]:
        """Places whose output `intermediates` can give, from the image to the head.

        Of a model of timm these are its stages and blocks; `intermediates` takes the name of any of its modules.
        """
        if isinstance(self.model, Model):
            return self.model.intermediate_names
        return tuple(place_names(self.model))

    def check_intermediate(self, name: str) -> None:
        """Raise a ConfigError with near misses if the model has no place of this name."""
        if not isinstance(self.model, Model):
            check_module(self.model, name)
        elif name not in self.intermediate_names:
            raise ConfigError(
                f"{self.name!r} has no intermediate {name!r}. {near_misses(name, self.intermediate_names)}"
            )

    def intermediates(self, images: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
        """NCHW maps behind named places; gradients reach the images."""
        wanted = list(names)
        if isinstance(self.model, Model):
            return self.model.intermediates(images, wanted)
        return maps_at(self.model, images, wanted)

    def to(self, device: torch.device | str) -> "Subject":
        self.model.to(device)
        return self


def open_subject(
    source: Source,
    *,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    in_channels: int | None = None,
    seed: int = 0,
    changes: Mapping[str, Any] | None = None,
) -> Subject:
    """The subject that a text such as those above names. Fresh weights are drawn from `seed`.

    `num_classes` and `in_channels` are for models with fresh weights; a file brings its own. `changes` are other
    options of `create_model`, which models of timm do not have.
    """
    own = dict(changes or {})
    wanted = {"num_classes": num_classes, "in_channels": in_channels}
    options: dict[str, Any] = {key: value for key, value in wanted.items() if value is not None}
    if isinstance(source, Model):
        return of_backbone(source.config.name, source, image_size, trained=True)
    text = str(source)
    name, mark, weights = text.partition("=")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name.startswith(TIMM):
            if own:
                raise ConfigError(f"{text!r} is not Mixlab's: its model cannot be changed by {', '.join(own)}.")
            return open_timm(name, weights if mark else None, image_size, options)
        if mark and not Path(text).is_file():  # folders may have such a sign in their names
            return of_backbone(
                text, create_model(name, weights=weights, **{**options, **own}), image_size, trained=True
            )
        if name in list_models():
            at_size: dict[str, Any] = {} if image_size is None else {"image_size": parse_image_size(image_size)}
            return of_backbone(name, create_model(name, **{**options, **at_size, **own}), image_size, trained=False)
        if not Path(text).is_file():
            raise ConfigError(
                f"{text!r} is neither a model nor a weight file. {near_misses(text, list_models())} "
                f"A model of timm is {TIMM}NAME."
            )
        return of_backbone(text, create_model(weights=text, **own), image_size, trained=True)


def of_backbone(name: str, model: Model, image_size: int | tuple[int, int] | None, *, trained: bool) -> Subject:
    config = model.config
    return Subject(
        name=name,
        model=model.eval(),
        image_size=config.evaluation_size if image_size is None else parse_image_size(image_size),
        in_channels=config.in_channels,
        num_classes=config.num_classes,
        preprocessing=config.preprocessing,
        class_names=model.class_names,
        trained=trained,
    )


def backbone_of(source: "Subject | nn.Module", what: str) -> Backbone:
    """The single Mixlab model of a subject: only these can show some things, such as "kernels"."""
    name, model = (source.name, source.model) if isinstance(source, Subject) else (type(source).__name__, source)
    if isinstance(model, Backbone):
        return model
    if not isinstance(model, Model):
        raise ConfigError(f"{name!r} cannot show its {what}: only Mixlab's own models declare where they are.")
    raise ConfigError(
        f"{model.config.name!r} is an ensemble, and {what} are a member's. Ask for one of its {len(model.backbones)}: "
        f"--member 0, or model.members[0] in Python."
    )


def open_timm(
    name: str, weights: str | None, image_size: int | tuple[int, int] | None, options: dict[str, Any]
) -> Subject:
    """A model of timm; one that is built for a single size is built for the size asked for."""
    import timm

    own = name.removeprefix(TIMM)
    if not timm.is_model(own):
        raise ConfigError(f"timm has no model {own!r}. {near_misses(own, timm.list_models())}")
    state = None
    if weights is not None and weights != PRETRAINED:
        state = read_timm(own, weights)
        options = {"num_classes": classes_of(own, state), **options} if state else options
    options = {("in_chans" if key == "in_channels" else key): value for key, value in options.items()}
    size = {} if image_size is None else {"img_size": parse_image_size(image_size)}
    try:
        model = build_timm(own, size, pretrained=weights == PRETRAINED, **options)
    except Exception as error:  # no network, a full cache, a name without weights
        raise WeightsError(f"timm cannot build {own!r}: {error}") from error
    if state is not None:
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            raise WeightsError(f"{weights} does not fit timm's {own!r}: {error}") from error
    settings = timm.data.resolve_model_data_config(model)
    return Subject(
        name=name if weights is None else f"{name}={weights}",
        model=model.eval(),
        image_size=tuple(settings["input_size"][1:]) if image_size is None else parse_image_size(image_size),
        in_channels=options.get("in_chans", settings["input_size"][0]),
        num_classes=getattr(model, "num_classes"),  # noqa: B009  set by every model of timm
        preprocessing=Preprocessing(
            mean=tuple(settings["mean"]),
            std=tuple(settings["std"]),
            interpolation=settings["interpolation"] if settings["interpolation"] != "random" else "bilinear",
            crop=settings["crop_pct"],
            crop_mode="squash" if settings["crop_mode"] == "squash" else "center",
        ),
        trained=weights is not None,
    )


def build_timm(name: str, size: dict[str, Any], **options: Any) -> nn.Module:
    import timm

    if not size:
        return timm.create_model(name, **options)
    try:
        return timm.create_model(name, **size, **options)
    except TypeError as error:  # convolutional models take any size and no such argument
        if "img_size" not in str(error):
            raise
        return timm.create_model(name, **options)


def read_timm(name: str, path: str) -> dict[str, Tensor]:
    from timm.models import load_state_dict

    if not Path(path).is_file():
        raise WeightsError(f"The weight file {path} for timm's {name!r} does not exist.")
    try:
        return load_state_dict(path, use_ema=True, weights_only=True)
    except Exception as error:  # whatever a broken file makes of it
        raise WeightsError(f"{path} holds no weights that timm can read: {error}") from error


def classes_of(name: str, state: dict[str, Tensor]) -> int:
    from timm.models import get_pretrained_cfg

    about = get_pretrained_cfg(name)
    classifier = "" if about is None else about.classifier
    weight = state.get(f"{classifier if isinstance(classifier, str) else classifier[0]}.weight")
    if weight is None:
        raise WeightsError(f"The file for timm's {name!r} has no classifier {classifier!r}: it is for another model.")
    return len(weight)


def timm_features(model: nn.Module) -> list[Any]:
    if not hasattr(model, "forward_intermediates"):
        raise ImageError(f"timm's {type(model).__name__} gives no maps of its stages.")
    return list(model.feature_info)  # type: ignore[arg-type]


def short_names(subjects: Sequence[Subject]) -> list[str]:
    """Names for tables and pictures that tell these apart."""
    short = [one.model.config.name if isinstance(one.model, Model) else one.name.partition("=")[0] for one in subjects]
    if len({one.trained for one in subjects}) > 1:
        short = [f"{name}, {'trained' if one.trained else 'random'}" for name, one in zip(short, subjects, strict=True)]
    return [name if short.count(name) == 1 else one.name for name, one in zip(short, subjects, strict=True)]
