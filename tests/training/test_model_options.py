from typing import Any

import pytest

from mixlab.core.errors import ConfigError
from mixlab.models.zoo import create_model, model_config
from mixlab.training.model_options import model_options, training_size
from mixlab.training.recipe import Recipe, load_recipe


def digits(**changes: Any) -> Recipe:
    return load_recipe("digits", changes=changes)


def test_a_recipe_sets_size_drop_path_dropout_and_evaluation() -> None:
    words: dict[str, Any] = {"image_size": 64, "drop_path": 0.1, "drop_path_schedule": "constant", "head_dropout": 0.3}
    options = model_options(digits(**words, eval_crop=0.9, eval_image_size=96), "caformer_s18")
    config = model_config("caformer_s18", **options)
    assert (config.image_size, config.evaluation_size, config.preprocessing.crop) == ((64, 64), (96, 96), 0.9)
    assert (config.drop_path.rate, config.drop_path.schedule) == (0.1, "constant")
    assert config.head.options.dropout == 0.3


def test_only_heads_with_a_dropout_get_one() -> None:
    assert "head" not in model_options(digits(head_dropout=0.3), "vil_pico")
    assert model_options(digits(head_dropout=0.3), "ensemble_hpx_conv_s18")["head"] == {"dropout": 0.3}


def test_options_of_the_run_go_before_those_of_the_recipe() -> None:
    recipe = digits(image_size=64, drop_path=0.1, model={"mlp_ratio": 1, "bias": True})
    own = {"image_size": 96, "drop_path": 0.3, "mlp_ratio": 2, "preprocessing": {"crop": 0.5}}
    options = model_options(recipe, "caformer_pico", options=own)
    told = {"image_size": 96, "drop_path": 0.3, "mlp_ratio": 2, "bias": True}
    assert options == {**told, "preprocessing": {"image_size": 64, "crop": 0.5}}
    assert training_size(recipe, model_config("caformer_pico", **options)) == (64, 64)


def test_a_part_of_an_option_leaves_the_recipes_other_values() -> None:
    """Such as the form of stochastic depth, without which its rate would fall to 0."""
    recipe = digits(drop_path=0.1, drop_path_schedule="constant", head_dropout=0.3)
    own = {"drop_path": {"form": "skip"}, "head": {"eps": 1e-6}}
    config = model_config("caformer_s18", **model_options(recipe, "caformer_s18", options=own))
    assert (config.drop_path.rate, config.drop_path.schedule, config.drop_path.form) == (0.1, "constant", "skip")
    assert (config.head.options.dropout, config.head.options.eps) == (0.3, 1e-6)
    plain = model_options(recipe, "caformer_s18", options={"drop_path": 0.0, "head": "linear"})
    assert (plain["drop_path"], plain["head"]) == (0.0, "linear")


def test_weights_bring_their_own_architecture() -> None:
    recipe = digits(drop_path=0.1, model={"mlp_ratio": 1})
    assert "mlp_ratio" in model_options(recipe, "caformer_pico")
    assert model_options(recipe, "caformer_pico", fresh=False) == {"drop_path": {"rate": 0.1}}


def test_an_unknown_option_of_the_model_is_an_error() -> None:
    options = model_options(digits(model={"mlp_ratios": 1}), "caformer_pico")
    with pytest.raises(ConfigError, match=r"Unknown model option 'mlp_ratios'. Did you mean 'mlp_ratio'"):
        create_model("caformer_pico", **options)
