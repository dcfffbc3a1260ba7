"""Learning rates of parts: layers in groups, and factors by name."""

import pytest
import torch

import mixlab
from mixlab.core.errors import ConfigError
from mixlab.training.optimizer import parameter_groups
from mixlab.training.recipe import Optimizer, load_recipe


def scales(model: torch.nn.Module, optimizer: Optimizer) -> dict[str, float]:
    by_id = {id(p): name for name, p in model.named_parameters()}
    groups = parameter_groups(model, optimizer)  # type: ignore[arg-type]
    return {by_id[id(p)]: group["lr_scale"] for group in groups for p in group["params"]}


@pytest.mark.parametrize("recipe", ["hyenapixel_ade20k_released", "hyenapixel_coco_released"])
def test_the_released_dense_recipes_decay_by_the_groups_of_convnext(recipe: str) -> None:
    """Eight steps of 0.7 from the stem to the heads; the nine blocks of the third stage are three groups."""
    optimizer = load_recipe(recipe, model="hpx_former_s18").optimizer
    assert (optimizer.weight_decay, optimizer.layer_decay, optimizer.decay_filters) == (0.05, 0.7, True)
    with torch.device("meta"):
        options = {"mixers": "identity"}
        model = mixlab.create_segmenter("hpx_former_s18", num_classes=3, backbone_options=options)
    found = scales(model, optimizer)
    groups = {"stem.conv": 0, "stages.0.blocks.2": 1, "stages.1.downsample": 2, "stages.1.blocks.1": 2}
    groups |= {"stages.2.downsample": 3, "stages.2.blocks.2": 3, "stages.2.blocks.3": 4, "stages.2.blocks.8": 5}
    groups |= {"stages.3.downsample": 6, "stages.3.blocks.0": 6, "stages.3.blocks.2": 6}
    for start, group in groups.items():
        own = {round(scale, 9) for name, scale in found.items() if name.startswith(f"maps.backbone.{start}.")}
        assert own == {round(0.7 ** (7 - group), 9)}, start
    assert {scale for name, scale in found.items() if not name.startswith("maps.backbone.")} == {1.0}


def test_the_released_detection_recipe_crops_and_warms_up_as_released() -> None:
    recipe = load_recipe("hyenapixel_coco_released", model="hpx_former_s18")
    assert recipe.detection is not None
    assert (recipe.detection.crop, recipe.schedule.warmup_updates, recipe.schedule.factor) == (0.5, 1000, 0.1)
    assert recipe.optimizer.lr == 2e-4


def test_groups_of_convnext_are_for_four_stages() -> None:
    model = mixlab.create_model("vil_pico", num_classes=2)
    with pytest.raises(ConfigError, match="four stages"):
        parameter_groups(model, Optimizer(lr=1.0, layer_groups="convnext"))


def test_deformable_detr_learns_its_offsets_and_points_at_a_tenth() -> None:
    optimizer = load_recipe("coat_deformable_detr").optimizer
    model = mixlab.create_detector("coat_lite_pico", "deformable_detr", num_classes=2, masks=False, queries=8)
    found = scales(model, optimizer)
    slow = {name for name, scale in found.items() if scale == pytest.approx(0.1) and "maps.backbone." not in name}
    assert slow
    assert slow == {name for name in found if ".sampling_offsets." in name or ".reference_points." in name}
    assert any(".reference_points." in name for name in slow)
    assert {round(scale, 9) for name, scale in found.items() if "maps.backbone." in name} == {0.1}


@pytest.mark.parametrize("factors", [(("*.offsets",),), (("*", -1.0),), ((3, 0.1),)])
def test_factors_that_cannot_be_are_an_error(factors: tuple[tuple[object, ...], ...]) -> None:
    with pytest.raises(ConfigError, match="rate_factors"):
        Optimizer(lr=1.0, rate_factors=factors)


def test_a_pattern_that_fits_no_parameter_is_an_error() -> None:
    model = mixlab.create_model("caformer_pico", num_classes=2)
    with pytest.raises(ConfigError, match="No trained parameter fits"):
        parameter_groups(model, Optimizer(lr=1.0, rate_factors=(("*.sampling_offsets.*", 0.1),)))
