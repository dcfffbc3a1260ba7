"""How models get their ImageNet weights: recipes that follow one another, and how many images each dataset has."""

import fnmatch
import functools
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from mixlab.core.choices import make
from mixlab.dense.timm_maps import is_timm
from mixlab.models.zoo import model_config


@dataclass(frozen=True, kw_only=True)
class Route:
    """Recipes that train models in several phases, up to an image size and from a larger dataset if there is one."""

    models: str  # a shell pattern
    phases: tuple[str, ...]
    image_size: int = 224
    pretraining: str | None = None


@functools.cache
def rows() -> dict[str, Any]:
    file = resources.files("mixlab") / "configs" / "routes.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def images_of(data: str) -> int:
    """Training images of a dataset."""
    images: int = rows()["images"][data]
    return images


@functools.cache
def routes() -> tuple[Route, ...]:
    return tuple(make(Route, row, "a route of routes.toml") for row in rows()["routes"])


def phases_of(model: str, image_size: int = 224, pretraining: str | None = None) -> tuple[str, ...]:
    """The recipes that lead a model to its ImageNet weights: a route that fits, else the model's own recipe.

    There are none for a model whose weights are public and whose training is not described.
    """
    if is_timm(model):
        return ()
    for route in routes():
        fits = (route.image_size, route.pretraining) == (image_size, pretraining)
        if fits and fnmatch.fnmatch(model, route.models):
            return route.phases
    own = model_config(model).recipe
    return (own,) if own else ()
