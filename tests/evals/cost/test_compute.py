from pathlib import Path

import pytest
import torch

import mixlab
from mixlab.core.errors import ConfigError
from mixlab.core.processes import processes
from mixlab.evals.cost.compute import (
    compute_of_recipes,
    count_macs,
    macs_against_resolution,
    macs_by_residual,
    training_compute,
)
from mixlab.evals.cost.imagenet import IMAGENET
from mixlab.models.backbone import Backbone
from mixlab.training.recipe import load_recipe
from mixlab.training.routes import images_of
from mixlab.training.run import Preparation, run_config


def test_macs_grow_with_the_pixels_for_vil_and_faster_for_attention() -> None:
    found, figures = macs_against_resolution(["vil_pico", "deit_tiny", "timm:resnet18"], sizes=[512, 1024, 2048])
    slopes = found.data["exponents"]
    assert slopes["vil_pico"] == pytest.approx(1.0, abs=0.01)
    assert slopes["timm:resnet18"] == pytest.approx(1.0, abs=0.01)
    assert 1.8 < slopes["deit_tiny"] < 2.0
    assert set(figures) == {"macs"}
    row = found.table[0]
    assert row[:3] == ("vil_pico", 512, 512)
    macs = found.data["rows"][0]["macs"]
    assert list(row[3:5]) == [macs / 1e9, 2 * macs / 1e9]


def test_a_peer_counts_by_the_same_rules() -> None:
    """timm's ViT and Mixlab's DeiT are the same network."""
    assert count_macs("timm:deit_tiny_patch16_224", 224) == pytest.approx(count_macs("deit_tiny", 224), rel=1e-6)


def test_a_size_that_a_model_cannot_take_is_a_row_with_the_reason() -> None:
    found, _ = macs_against_resolution(["caformer_pico"], sizes=[16, 64])
    assert found.data["rows"][0]["macs"] is None
    assert "32 px" in found.data["rows"][0]["reason"]
    assert found.data["rows"][1]["macs"] == mixlab.macs(mixlab.create_model("caformer_pico"), 64)


def test_residuals_and_the_rest_add_up() -> None:
    model = mixlab.create_model("coat_tiny", drop_path=0.2)
    other, residuals = macs_by_residual(model, (64, 64))
    assert other + sum(macs for macs, _ in residuals) == mixlab.macs(model, 64)
    assert {round(rate, 3) for macs, rate in residuals if macs} >= {0.2}


def test_the_compute_of_a_training_is_what_arithmetic_says() -> None:
    phase = training_compute("vil_base", "vision_lstm_imagenet_192")
    blocks = 24
    with torch.device("meta"):
        model = mixlab.create_model("vil_base", image_size=192)
    whole = mixlab.macs(model, 192)
    other, residuals = macs_by_residual(model, (192, 192))
    assert len(residuals) == blocks
    kept = other + 0.8 * (whole - other)  # a constant drop rate of 0.2
    assert (phase.forward_macs, phase.epochs, phase.images) == (whole, 400, IMAGENET)
    assert phase.kept_macs == pytest.approx(kept)
    assert phase.total_flops == pytest.approx(2 * 3 * kept * 1_281_167 * 400)
    assert phase.saving == pytest.approx(0.2, abs=0.002)
    assert phase.gpu_hours(100.0) == pytest.approx(phase.total_flops / 1e14 / 3600)


@pytest.mark.parametrize("options", [{"mlp_ratio": 1}, {"mixers": "pool"}, {"image_size": 64}])
def test_options_of_the_model_in_a_recipe_are_counted(options: dict[str, object], tmp_path: Path) -> None:
    recipe = load_recipe("digits", model="caformer_pico", changes={"model": options})
    phase = training_compute("caformer_pico", recipe, num_classes=10)
    config = run_config("caformer_pico", "digits", recipe="digits", changes={"model": options}, micro=1)
    with processes("cpu") as own:
        run = Preparation(config, tmp_path, own)
    assert isinstance(run.model, Backbone)
    assert (phase.image_size, phase.forward_macs) == (run.image_size, mixlab.macs(run.model, run.image_size))
    plain = training_compute("caformer_pico", "digits", num_classes=10)
    assert phase.forward_macs != plain.forward_macs


def test_masking_computes_what_it_drops() -> None:
    skip, mask = (training_compute("vil_base", "vision_lstm_imagenet_192", form=form) for form in ("skip", "mask"))
    assert mask.step_macs == 3 * mask.forward_macs
    assert skip.step_macs == pytest.approx(mask.step_macs * (1 - skip.saving))


def test_a_rising_drop_rate_saves_half_of_a_constant_one() -> None:
    ramp = training_compute("vil_pico", load_recipe("vision_lstm_imagenet_192", changes={"drop_path_schedule": "ramp"}))
    flat = training_compute("vil_pico", "vision_lstm_imagenet_192")
    assert ramp.saving == pytest.approx(flat.saving / 2)


def test_skipping_saves_what_is_counted() -> None:
    """The residuals of a batch that is run with skipping see the share of images that the count expects."""
    drops = {"rate": 0.5, "schedule": "constant", "form": "skip"}
    model = mixlab.create_model("vil_pico", drop_path=drops).train()
    seen: list[int] = []
    for block in model.stages[0].blocks:
        block.token.branches[0].register_forward_hook(lambda m, inputs, out: seen.append(len(inputs[0])))
    model(torch.randn(8, 3, 32, 32))
    assert seen == [4] * len(model.stages[0].blocks)
    other, residuals = macs_by_residual(model.eval(), (32, 32))
    assert sum(macs * (1 - rate) for macs, rate in residuals) == pytest.approx((mixlab.macs(model, 32) - other) / 2)


def test_updates_and_cool_downs_become_epochs() -> None:
    updates = load_recipe("digits", changes={"schedule.updates": 100, "schedule.warmup_updates": 0})
    assert training_compute("caformer_pico", updates, images=640).epochs == pytest.approx(100 * 64 / 640)
    assert training_compute("caformer_s18", "caformer_imagenet").epochs == 310


def test_a_probe_pays_the_backward_pass_of_the_head_only() -> None:
    phase = training_compute("caformer_pico", "linear_probe", images=1000)
    assert phase.step_macs == phase.forward_macs + 2 * phase.head_macs
    assert 0 < phase.head_macs < phase.forward_macs / 10


def test_phases_add_up() -> None:
    recipes = ["vision_lstm_imagenet_192", "vision_lstm_imagenet_224"]
    found, figures = compute_of_recipes(["vil_tiny"], recipes, images=1000, tflops=50.0)
    first, second, both = found.table
    assert (first[2], second[2], both[1]) == (192, 224, "all")
    assert both[3] == 820
    total = sum(phase["total_flops"] for phase in found.data["phases"])
    assert both[-2] == pytest.approx(total / 1e18)
    assert both[-1] == pytest.approx(total / 50e12 / 3600)
    assert found.columns[-1] == "GPU hours at 50 TFLOP/s"
    assert set(figures) == {"training_compute"}


def test_models_under_recipes_of_their_own_are_drawn_apart() -> None:
    recipes = {"caformer_pico": ["digits"], "vil_pico": ["digits", "linear_probe"]}
    found, figures = compute_of_recipes(["caformer_pico", "vil_pico"], recipes, images=1000)
    assert [tuple(row[:2]) for row in found.table] == [
        ("caformer_pico", "digits"),
        ("vil_pico", "digits"),
        ("vil_pico", "linear_probe"),
        ("vil_pico", "all"),
    ]
    (axes,) = figures["training_compute"].axes
    assert {"digits", "digits + linear_probe"} <= {text.get_text() for text in axes.texts}


def test_images_are_those_of_the_recipes_imagenet() -> None:
    images = {name: images_of(name) for name in ("imagenet", "imagenet21k")}
    small, large = (training_compute("caformer_s18", f"caformer_{name}") for name in ("imagenet", "imagenet21k"))
    assert (small.images, large.images) == (images["imagenet"], images["imagenet21k"])
    assert training_compute("caformer_s18", "caformer_imagenet21k", images=9).images == 9


def test_changes_of_the_models_are_counted() -> None:
    changes = {"mixers": "pool"}
    pooled = mixlab.macs(mixlab.create_model("caformer_pico", mixers="pool"), 32)
    found, _ = macs_against_resolution(["caformer_pico"], sizes=[32], changes=changes)
    assert found.data["rows"][0]["macs"] == pooled
    trained, _ = compute_of_recipes(["caformer_pico"], ["digits", "linear_probe"], changes=changes)
    assert [phase["forward_macs"] for phase in trained.data["phases"]] == [pooled, pooled]
    assert found.settings["changes"] == trained.settings["changes"] == changes
    with pytest.raises(ConfigError, match="is not Mixlab's"):
        macs_against_resolution(["timm:resnet18"], sizes=[64], changes=changes)


def test_later_phases_have_the_architecture_of_the_first(tmp_path: Path) -> None:
    first, later = tmp_path / "first.toml", tmp_path / "later.toml"
    text = "batch_size = 8\n[optimizer]\nlr = 1e-3\n[schedule]\nepochs = 1\n[model]\n"
    first.write_text(text + 'mixers = "pool"\n')
    later.write_text(text + "mlp_ratio = 1\n")
    found, _ = compute_of_recipes(["caformer_pico"], [str(first), str(later)])
    one, other = (phase["forward_macs"] for phase in found.data["phases"])
    assert one == other == mixlab.macs(mixlab.create_model("caformer_pico", mixers="pool"), 32)


@pytest.mark.parametrize(
    ("model", "recipe", "words", "said"),
    [
        ("timm:resnet18", "digits", {}, "named models of Mixlab"),
        ("caformer_pico", "metaformer_ade20k", {}, "is for segmentation"),
        ("ensemble_hpx_conv_s18", "digits", {}, "is an ensemble"),
        ("caformer_pico", "digit", {}, "Did you mean 'digits'"),
        ("caformer_pico", "digits", {"images": 0}, "1 training image"),
        ("caformer_pico", "digits", {"form": "drop"}, "'skip' or 'mask'"),
    ],
)
def test_what_cannot_be_counted_is_an_error(model: str, recipe: str, words: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        training_compute(model, recipe, **words)  # type: ignore[arg-type]
