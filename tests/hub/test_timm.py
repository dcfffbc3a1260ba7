"""Timm's conventions for features and classifiers hold for every registered model."""

import copy
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import timm.data
import timm.models
import timm.optim
import timm.utils
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models import group_parameters
from torch import Tensor, nn

import mixlab
import mixlab.hub.timm
from mixlab.core.errors import ConfigError
from mixlab.hub.timm import NAMES
from mixlab.hub.timm_backbone import TimmBackbone, chosen
from mixlab.models.released import releases

# one of each kind: stages, rows and columns, one stage with ends, class tokens, several scales, every family's smallest
QUICK = ["caformer_pico", "coat_tiny", "deit_tiny", "hpx_former_pico", "sequencer2d_pico", "vil_pico"]


def create(name: str, **options: Any) -> Any:
    return timm.create_model(f"mixlab_{name}", **options).eval()


def awake(model: Any) -> Any:
    """Classifiers that start at zero would make every comparison of scores true."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, mean=0.02, std=0.05)
    return model


def side(model: Any) -> int:
    return min(model.config.image_size[0], 64)


def fits(maps: list[Tensor], info: Any, size: tuple[int, int]) -> None:
    assert len(maps) == len(info.channels())
    for level, channels, reduction in zip(maps, info.channels(), info.reduction(), strict=True):
        assert level.ndim == 4
        assert level.shape[1] == channels
        for cells, pixels in zip(level.shape[2:], size, strict=True):
            assert pixels // reduction <= cells + 1
            assert cells <= math.ceil(pixels / reduction) + 1


# -- the registry --------------------------------------------------------------------------------


def test_every_single_model_is_registered_and_ensembles_are_not() -> None:
    single = [name for name in mixlab.list_models() if not name.startswith("ensemble")]
    assert sorted(timm.list_models("mixlab_*")) == sorted(f"mixlab_{name}" for name in single)


def test_registering_needs_one_import_and_the_real_timm_stays_itself() -> None:
    lines = (
        "import mixlab.timm, timm; print(timm.__version__, mixlab.timm is not timm, timm.is_model('mixlab_vil_tiny'))"
    )
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1:] == ["True", "True"]


@pytest.mark.parametrize("name", NAMES)
def test_the_shapes_of_all_models_are_what_they_state(name: str) -> None:
    """On the meta device, where the largest models cost little."""
    with torch.device("meta"):
        model = create(name)
        last, maps = model.forward_intermediates(torch.empty(1, 3, 97, 131))
        scores = model.forward_head(last)
    fits(maps, timm.models.FeatureInfo(model.feature_info, len(model.feature_info)), (97, 131))
    assert len(maps) == len(model.feature_info) >= 4
    assert last.shape[2 if model.output_fmt == "NLC" else 1] == model.num_features
    assert scores.shape == (1, 1000)
    cfg, keys = model.default_cfg, model.state_dict().keys()
    assert f"{cfg['classifier']}.weight" in keys
    assert f"{cfg['first_conv']}.weight" in keys
    assert cfg["pool_size"] == tuple(model.reference_grids[-1][:2])
    assert cfg["architecture"] == f"mixlab_{name}"
    prepared, own = timm.data.resolve_model_data_config(model), model.config.preprocessing
    released = next(iter(releases().get(name, {}).values()), None)
    assert prepared["input_size"] == (3, *model.config.image_size)
    assert (prepared["mean"], prepared["std"], prepared["interpolation"]) == (own.mean, own.std, own.interpolation)
    assert prepared["crop_pct"] == ((released and released.crop) or own.crop)


def test_sequencer_coat_and_vision_lstm_state_their_true_strides() -> None:
    with torch.device("meta"):
        info = {
            name: create(name, features_only=True).feature_info for name in ("sequencer2d_s", "coat_tiny", "vil_tiny")
        }
    assert info["sequencer2d_s"].reduction() == [7, 14, 14, 14]
    assert info["coat_tiny"].reduction() == [4, 8, 16, 32]
    assert info["vil_tiny"].reduction() == [16, 16, 16, 16]
    assert info["vil_tiny"].out_indices == (7, 11, 15, 23)  # behind pairs 4, 6, 8 and 12


# -- features ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", QUICK)
def test_features_only_gives_the_maps_of_the_pyramid(name: str) -> None:
    features, model = create(name, features_only=True), mixlab.create_model(name).eval()
    own = {key: value for key, value in model.state_dict().items() if key in features.model.state_dict()}
    features.model.load_state_dict(own)
    image = torch.randn(1, 3, side(model), side(model))
    with torch.no_grad():
        maps, expected = features(image), model.pyramid(image)
    fits(maps, features.feature_info, (side(model), side(model)))
    for one, other in zip(maps, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("indices", [(0,), (0, 1), (-1,), (1, 3), (3, 0), 2])
@pytest.mark.parametrize("name", ["caformer_pico", "sequencer2d_pico", "vil_pico", "coat_tiny", "deit_tiny"])
def test_any_out_indices_give_maps_in_the_order_of_feature_info(name: str, indices: Any) -> None:
    whole = awake(create(name))
    part = create(name, features_only=True, out_indices=indices)
    part.model.load_state_dict(
        {key: value for key, value in whole.state_dict().items() if key in part.model.state_dict()}
    )
    image = torch.randn(1, 3, 45, 70)
    with torch.no_grad():
        maps = part(image)
        expected = whole.forward_intermediates(image, indices=indices, intermediates_only=True)
    fits(maps, part.feature_info, (45, 70))
    assert all(torch.equal(one, other) for one, other in zip(maps, expected, strict=True))


def test_features_only_drops_what_no_feature_needs() -> None:
    early = create("caformer_pico", features_only=True, out_indices=(1,))
    assert not any(name.startswith(("model.stages.2", "model.head")) for name, _ in early.named_parameters())
    assert len(create("vil_pico", features_only=True, out_indices=(2,)).model.stages[0].blocks) == 3
    coarse = create("coat_tiny", features_only=True, out_indices=(0,)).model
    assert coarse.coscale is None
    assert len(coarse.stages) == 1
    assert len(create("coat_tiny", features_only=True, out_indices=(1,)).model.stages) == 4  # scales see each other


@pytest.mark.parametrize("name", QUICK)
def test_every_trained_parameter_of_a_feature_extractor_gets_a_gradient(name: str) -> None:
    features = create(name, features_only=True).train()
    torch.stack([level.square().sum() for level in features(torch.randn(2, 3, 64, 64))]).sum().backward()
    lost = [key for key, value in features.named_parameters() if value.requires_grad and value.grad is None]
    assert lost == []


@pytest.mark.parametrize("name", QUICK)
def test_forward_intermediates_end_in_forward_features(name: str) -> None:
    model = awake(create(name))
    image = torch.randn(2, 3, side(model), side(model))
    with torch.no_grad():
        last, maps = model.forward_intermediates(image)
        torch.testing.assert_close(last, model.forward_features(image))
        torch.testing.assert_close(model.forward_head(last), model(image))
        early, stopped = model.forward_intermediates(image, indices=[0, 1], stop_early=True)
    assert torch.equal(stopped[1], maps[1])
    assert torch.equal(early, maps[1])


def test_stopping_early_computes_nothing_behind_the_last_feature() -> None:
    model, seen = create("caformer_pico"), []
    for stage in model.stages:
        stage.register_forward_hook(lambda *_: seen.append(1))
    model.forward_intermediates(torch.randn(1, 3, 32, 32), indices=[1], stop_early=True)
    assert len(seen) == 2


def test_output_formats_are_views_of_the_same_features() -> None:
    model, image = create("deit_tiny"), torch.randn(1, 3, 48, 64)
    with torch.no_grad():
        found = {
            fmt: model.forward_intermediates(image, indices=1, output_fmt=fmt, intermediates_only=True)[0]
            for fmt in ("NCHW", "NHWC", "NLC")
        }
    assert found["NCHW"].shape == (1, 192, 3, 4)
    assert torch.equal(found["NHWC"], found["NCHW"].permute(0, 2, 3, 1))
    assert torch.equal(found["NLC"], found["NHWC"].flatten(1, 2))
    with pytest.raises(ConfigError, match="NCHW"):
        model.forward_intermediates(image, output_fmt="NCHX")


@pytest.mark.parametrize("name", ["vil_pico", "sequencer2d_pico", "coat_tiny"])
def test_norm_makes_the_last_feature_the_last_map(name: str) -> None:
    model = awake(create(name))
    with torch.no_grad():
        last, maps = model.forward_intermediates(torch.randn(1, 3, 32, 32), norm=True)
    tokens = last.permute(0, 2, 3, 1).flatten(1, 2) if last.ndim == 4 else last[:, 1:]
    torch.testing.assert_close(maps[-1].permute(0, 2, 3, 1).flatten(1, 2), tokens)


@given(st.integers(1, 9), st.data())
def test_indices_count_from_both_ends(count: int, data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.integers(-count, count - 1), min_size=1))
    assert chosen(count, wanted) == [list(range(count))[index] for index in wanted]
    number = data.draw(st.integers(1, count))
    assert chosen(count, number) == list(range(count))[-number:]
    assert chosen(count, None) == list(range(count))
    for wrong in (0, count + 1, [count], [-count - 1], []):
        with pytest.raises(ConfigError, match=f"{count} features"):
            chosen(count, wrong)


@settings(max_examples=12, deadline=None)
@given(st.integers(32, 90), st.integers(32, 90), st.sampled_from(mixlab.list_models("*_pico")))
def test_odd_sizes_keep_to_feature_info(height: int, width: int, name: str) -> None:
    features = create(name, features_only=True)
    with torch.no_grad():
        fits(features(torch.randn(1, 3, height, width)), features.feature_info, (height, width))


def test_features_come_as_maps_or_not_at_all() -> None:
    with pytest.raises(ConfigError, match="getter"):
        create("caformer_pico", features_only=True, feature_cls="hook")


# -- classifiers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", QUICK)
def test_scores_are_those_of_mixlab_with_the_same_weights(name: str) -> None:
    model = awake(mixlab.create_model(name)).eval()
    other = create(name)
    other.load_state_dict(model.state_dict())
    image = torch.randn(2, 3, 50, 66)
    with torch.no_grad():
        expected = model(image)
        assert expected.std() > 0
        torch.testing.assert_close(other(image), expected)


def test_the_same_seed_draws_the_same_weights_as_mixlab() -> None:
    torch.manual_seed(3)
    model = mixlab.create_model("vil_pico")
    torch.manual_seed(3)
    other = create("vil_pico")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", QUICK)
def test_without_classes_the_model_gives_pre_logits(name: str) -> None:
    model = awake(create(name))
    image = torch.randn(2, 3, side(model), side(model))
    with torch.no_grad():
        features = model.forward_features(image)
        pooled = model.forward_head(features, pre_logits=True)
        torch.testing.assert_close(pooled, model.embed(image))
        assert pooled.shape == (2, model.head_hidden_size)
        model.reset_classifier(0)
        torch.testing.assert_close(model(image), pooled)  # one plan beside parts: alike but for rounding
        assert model.num_classes == 0
        model.reset_classifier(0, "")
        assert torch.equal(model(image), features)
        model.reset_classifier(7, "token" if model.output_fmt == "NLC" else "avg")
        assert model(image).shape == (2, 7)
    assert create(name, num_classes=0)(image).shape == pooled.shape
    assert create(name, num_classes=0, global_pool="")(image).shape == features.shape


@pytest.mark.parametrize("name", ["caformer_pico", "vil_pico", "coat_tiny"])
def test_other_channels_classes_and_sizes(name: str) -> None:
    model = create(name, in_chans=1, num_classes=5, img_size=(40, 56))
    assert model.config.image_size == (40, 56)
    assert model.in_chans == 1
    assert model(torch.randn(2, 1, 40, 56)).shape == (2, 5)
    assert model.get_classifier().out_features == 5
    features = create(name, in_chans=1, features_only=True)
    fits(features(torch.randn(1, 1, 40, 40)), features.feature_info, (40, 40))


@pytest.mark.parametrize(("name", "width"), [("vil_pico", 128), ("deit_tiny", 192), ("coat_lite_pico", None)])
def test_average_pooling_is_the_mean_of_the_map(name: str, width: int | None) -> None:
    model = awake(create(name, global_pool="avg", num_classes=4))
    with torch.no_grad():
        features = model.forward_features(torch.randn(1, 3, 32, 48))
        pooled = model.forward_head(features, pre_logits=True)
    assert features.ndim == 4
    torch.testing.assert_close(pooled, features.mean((2, 3)))
    assert pooled.shape[1] == model.num_features == (width or model.num_features)
    assert model.config.pool.name == "mean"


def test_poolings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_classes=0"):
        create("caformer_pico", global_pool="")
    with pytest.raises(ConfigError, match="no single last map"):
        create("coat_tiny", global_pool="avg")
    with pytest.raises(ConfigError, match="class_tokens"):
        create("caformer_pico", global_pool="token")
    with pytest.raises(ConfigError, match="'avg'"):
        create("caformer_pico", global_pool="average")


def test_drop_rates_act_in_training_only() -> None:
    model = awake(create("caformer_pico", drop_rate=0.5, drop_path_rate=0.3))
    image = torch.randn(2, 3, 32, 32)
    assert model.config.drop_path.rate == 0.3
    assert torch.equal(model(image), model(image))
    model.train()
    assert not torch.equal(model(image), model(image))
    still = create("caformer_pico", drop_rate=0.5).train()
    features = torch.randn(64, 128, 2, 2)
    zeros = (still.forward_head(features, pre_logits=True) == 0).float().mean()
    assert 0.45 < zeros < 0.55


def test_any_mixer_goes_through_timm() -> None:
    model = create("caformer_pico", mixers=["pool", "sepconv", "mlstm", "attention"])
    assert [choice.name for choice in model.config.mixers] == ["pool", "sepconv", "mlstm", "attention"]
    with pytest.raises(ConfigError, match="mixers"):
        create("caformer_pico", mixer="pool")


# -- what timm's train.py and validate.py do -----------------------------------------------------


def test_layer_decay_follows_the_order_of_the_layers() -> None:
    model = create("vil_pico")
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1.0, weight_decay=0.05, layer_decay=0.5)
    scale = {
        id(p): (group["lr_scale"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]
    }
    layers = model.layer_order
    for index, (_, names) in enumerate(layers):
        for name in names:
            expected = 0.0 if name in model.no_decay else 0.05
            assert scale[id(model.get_parameter(name))] == (0.5 ** (len(layers) - 1 - index), expected)


@pytest.mark.parametrize("name", ["caformer_pico", "coat_tiny", "vil_pico"])
def test_every_parameter_is_in_one_group_also_in_coarse_ones(name: str) -> None:
    model = create(name)
    for coarse in (False, True):
        groups = group_parameters(model, model.group_matcher(coarse=coarse))
        assert sorted(n for group in groups.values() for n in group) == sorted(n for n, _ in model.named_parameters())
    assert groups[0] == [n for n, _ in model.named_parameters() if n.startswith("stem")]
    assert model.group_matcher()("head") == len(model.layer_order) - 1


def test_gradient_checkpointing_changes_no_gradient() -> None:
    model = awake(create("coat_tiny"))
    image = torch.randn(1, 3, 32, 32)
    model(image).sum().backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.set_grad_checkpointing()
    assert all(stage.checkpointing for stage in model.stages)
    model(image).sum().backward()
    for name, p in model.named_parameters():
        if name in plain:
            torch.testing.assert_close(p.grad, plain[name])


def test_a_step_of_timms_training_with_ema_checkpoint_and_resume(tmp_path: Path) -> None:
    model = create("caformer_pico", num_classes=3, drop_path_rate=0.1).train()
    optimizer = timm.optim.create_optimizer_v2(model, opt="lamb", lr=0.01, layer_decay=0.8)
    ema = timm.utils.ModelEmaV3(model, decay=0.5)
    loss = nn.functional.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.tensor([0, 1, 2, 0]))
    loss.backward()
    timm.utils.dispatch_clip_grad(timm.models.model_parameters(model), 1.0, mode="norm")
    optimizer.step()
    ema.update(model)
    saver = timm.utils.CheckpointSaver(model, optimizer, model_ema=ema, checkpoint_dir=str(tmp_path), max_history=1)
    saver.save_checkpoint(0, metric=1.0)
    file = str(tmp_path / "checkpoint-0.pth.tar")
    image = torch.randn(1, 3, 32, 32)
    averaged = create("caformer_pico", num_classes=3, checkpoint_path=file)  # takes the averaged weights
    assert torch.equal(averaged(image), ema.module.eval()(image))
    again = create("caformer_pico", num_classes=3)
    assert timm.models.resume_checkpoint(again, file, log_info=False) == 1
    assert torch.equal(again(image), model.eval()(image))
    twin = mixlab.create_model("caformer_pico", weights=file, num_classes=3).eval()
    assert torch.equal(twin(image), averaged(image))


def test_copies_are_independent() -> None:
    model = create("hpx_former_pico")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.get_classifier().weight.add_(1)
    assert not torch.equal(twin.get_classifier().weight, model.get_classifier().weight)
    assert isinstance(twin, TimmBackbone)


# -- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["caformer_pico", "hb_former_pico", "vil_pico"])
def test_files_of_mixlab_load_through_timm(name: str, tmp_path: Path) -> None:
    model = awake(mixlab.create_model(name, num_classes=6)).eval()
    file = tmp_path / "weights.safetensors"
    mixlab.save_weights(model, file)
    image = torch.randn(1, 3, 40, 40)
    with torch.no_grad():
        assert torch.equal(create(name, num_classes=6, checkpoint_path=str(file))(image), model(image))
        overlay = {"file": str(file), "num_classes": 6}
        larger = create(name, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=6, img_size=64)
        torch.testing.assert_close(
            larger(image), mixlab.create_model(name, weights=file, num_classes=6, image_size=64)(image)
        )
        fresh = create(name, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=2)
        torch.testing.assert_close(fresh.embed(image), model.embed(image))
    assert fresh.get_classifier().out_features == 2
    mixlab.save_weights(fresh, tmp_path / "back.safetensors")
    assert mixlab.create_model(weights=tmp_path / "back.safetensors").config.num_classes == 2


def test_weights_in_timms_own_layout_are_converted() -> None:
    peer = awake(timm.create_model("poolformerv2_s12")).eval()
    overlay = {"state_dict": peer.state_dict()}
    model = create("poolformerv2_s12", pretrained=True, pretrained_cfg_overlay=overlay)
    grey = create("poolformerv2_s12", pretrained=True, pretrained_cfg_overlay=overlay, in_chans=1, num_classes=0)
    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = peer(image)
        assert (model(image) - expected).abs().max() < 1e-4 * expected.std()
        assert torch.equal(grey.stem.conv.weight, model.stem.conv.weight.sum(1, keepdim=True))


@pytest.mark.heavy
@pytest.mark.parametrize("name", NAMES)
def test_the_whole_contract_with_values(name: str) -> None:
    model = mixlab.create_model(name).eval()
    features, other = create(name, features_only=True), create(name)
    other.load_state_dict(model.state_dict())
    features.model.load_state_dict({k: v for k, v in model.state_dict().items() if k in features.model.state_dict()})
    for size in ((224, 224), (97, 131)):
        image = torch.randn(1, 3, *size)
        with torch.no_grad():
            fits(features(image), features.feature_info, size)
            for one, expected in zip(features(image), model.pyramid(image), strict=True):
                torch.testing.assert_close(one, expected)
            torch.testing.assert_close(other(image), model(image))
            torch.testing.assert_close(
                other.forward_head(other.forward_features(image), pre_logits=True), model.embed(image)
            )
