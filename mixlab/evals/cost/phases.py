"""Which recipes, in order, make up the training of each model whose compute is counted."""

from collections.abc import Sequence

from mixlab.core.errors import ConfigError, near_misses
from mixlab.models.zoo import ensemble_row, list_models, model_config
from mixlab.training.routes import phases_of


def recipes_of(models: Sequence[str], asked: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """Recipes by model. What is asked for is NAME, for every model, or MODEL=NAME, for that one in place of the others.

    A model for which nothing is asked is trained as its paper trains it.
    """
    shared: list[str] = []
    own: dict[str, list[str]] = {model: [] for model in models}
    for text in asked:
        model, mark, recipe = text.partition("=")
        if not mark:
            shared.append(text)
        elif model not in own:
            raise ConfigError(f"{text!r} is for a model that is not counted here. {near_misses(model, own)}")
        else:
            own[model].append(recipe)
    return {model: tuple(recipes or shared or published(model)) for model, recipes in own.items()}


def published(model: str) -> tuple[str, ...]:
    """A model's own recipe, and the phases that follow it in its paper."""
    if model not in list_models():
        raise ConfigError(f"Only named models of Mixlab have recipes of their own; got {model!r}. Give --recipe NAME.")
    row = ensemble_row(model)
    if row is not None:
        raise ConfigError(f"{model!r} is an ensemble: count its members {', '.join(row.members)} one by one.")
    own, route = model_config(model).recipe, phases_of(model)
    if not own:
        raise ConfigError(f"No paper of Mixlab's describes how {model!r} was trained. Give --recipe {model}=NAME.")
    return route if route[0] == own else (own,)  # small models go their own way
