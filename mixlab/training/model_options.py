"""What a recipe does to a model: the options with which a run builds it, and the size of its training images."""

from collections.abc import Mapping
from typing import Any

from mixlab.core.choices import plain
from mixlab.models.config import ModelConfig, parse_image_size
from mixlab.models.zoo import ensemble_row, model_config
from mixlab.training.recipe import Recipe


def model_options(
    recipe: Recipe, model: str, *, options: Mapping[str, Any] | None = None, fresh: bool = True
) -> dict[str, Any]:
    """Options of `create_model` for a named model under a recipe. `options` are the run's own and go first.

    Options of the run may change a part of drop path, head or preprocessing; the recipe's other values hold then. A
    model that is not `fresh` starts from weights, which come with the architecture that they were trained in: the
    recipe's `model` is left out.
    """
    found: dict[str, Any] = {**(recipe.model if fresh else {}), **(options or {})}
    if recipe.image_size is not None:
        found.setdefault("image_size", recipe.image_size)
    drops = known(rate=recipe.drop_path, schedule=recipe.drop_path_schedule)
    if drops:
        found["drop_path"] = with_parts(drops, found.get("drop_path"))
    if recipe.head_dropout is not None and uses_dropout(model):
        found["head"] = with_parts({"dropout": recipe.head_dropout}, found.get("head"))
    prepared = {**evaluation(recipe), **plain(found.get("preprocessing", {}))}
    return {**found, "preprocessing": prepared} if prepared else found


def evaluation(recipe: Recipe) -> dict[str, Any]:
    """What a recipe says about images in evaluation, for the model's config: a weight file is evaluated as it was here.

    Segmenters and detectors have their own ways.
    """
    if recipe.task != "classification":
        return {}
    size = recipe.image_size if recipe.eval_image_size is None else recipe.eval_image_size
    return known(crop=recipe.eval_crop, crop_mode=recipe.eval_crop_mode, image_size=size)


def with_parts(recipes: dict[str, Any], own: Any) -> Any:
    """An option of the run on top of the recipe's, if it changes a part; another thing by name takes its place."""
    if own is None:
        return recipes
    return {**recipes, **own} if isinstance(own, Mapping) and "name" not in own else own


def known(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def training_size(recipe: Recipe, config: ModelConfig) -> tuple[int, int]:
    """Height and width of the images that a classifier is trained on: the recipe's, else the model's own."""
    return parse_image_size(list(config.image_size) if recipe.image_size is None else recipe.image_size)


def uses_dropout(model: str) -> bool:
    """Whether a model's head has a dropout to set."""
    row = ensemble_row(model)
    return model_config(model if row is None else row.members[0]).head.name == "mlp"
