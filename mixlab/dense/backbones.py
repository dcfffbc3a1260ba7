"""The backbone that a segmenter or detector is built on."""

from collections.abc import Mapping
from os import PathLike
from typing import Any

from mixlab.backbone import Backbone
from mixlab.ensemble import Ensemble
from mixlab.errors import ConfigError
from mixlab.weights import load_weights
from mixlab.zoo import create_model


def backbone_for(
    what: str, backbone: str | Backbone, options: Mapping[str, Any] | None, weights: str | PathLike[str] | None
) -> Backbone:
    """A new one by name, or the one that is given; without a classifier, and with the weights of a file."""
    if isinstance(backbone, str):
        backbone = create_model(backbone, **{**(options or {}), "num_classes": 0})
    elif options:
        raise ConfigError("backbone_options change a named backbone; this one is built. Build it with them.")
    if not isinstance(backbone, Backbone) or isinstance(backbone, Ensemble):
        raise ConfigError(f"A {what} needs the name of a model, or a single one; got a {type(backbone).__name__}.")
    if weights is not None:
        if backbone.config.num_classes:
            backbone.reset_classifier(0)
        load_weights(backbone, weights, replace_classifier=True)
    return backbone
