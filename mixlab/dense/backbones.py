"""The backbone that a segmenter or detector is built on."""

import warnings
from collections.abc import Mapping
from os import PathLike
from typing import Any

from mixlab.core.errors import ConfigError
from mixlab.dense.timm_maps import is_timm, timm_maps
from mixlab.models.backbone import Backbone
from mixlab.models.released import fetch, find_release, is_released
from mixlab.models.weights import load_weights
from mixlab.models.zoo import create_model


def backbone_for(
    what: str,
    backbone: str | Backbone,
    options: Mapping[str, Any] | None,
    weights: str | PathLike[str] | None,
    *,
    usual: Mapping[str, Any] | None = None,
) -> Backbone:
    """A new one by name, or the one that is given; without a classifier, and with weights of a file or "released".

    `usual` options hold for a named backbone unless `options` say otherwise. "timm:NAME" is a model of timm.
    """
    if is_timm(backbone):
        return timm_maps(str(backbone), options, weights)
    unasked = {key: value for key, value in (usual or {}).items() if key not in (options or {})}
    if isinstance(backbone, str):
        backbone = create_model(backbone, **{**unasked, **(options or {}), "num_classes": 0})
    elif options:
        raise ConfigError("backbone_options change a named backbone; this one is built. Build it with them.")
    if not isinstance(backbone, Backbone):
        raise ConfigError(f"A {what} needs the name of a model, or a single one; got a {type(backbone).__name__}.")
    if weights is not None:
        if backbone.config.num_classes:
            backbone.reset_classifier(0)
        source = fetch(find_release(backbone.config.name, str(weights))) if is_released(weights) else weights
        with warnings.catch_warnings():
            if unasked:  # the published way: weights of the classifier in a backbone that differs in just these
                warnings.filterwarnings("ignore", f".* with other {', '.join(unasked)}; ")
            load_weights(backbone, source, replace_classifier=True)
    return backbone
