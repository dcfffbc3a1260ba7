import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mixlab
from mixlab.core.errors import ConfigError, DataError
from mixlab.dense.segmenter import Segmenter, SegmenterConfig, class_counts, create_segmenter, pixel_loss
from mixlab.dense.upernet import UperNet, enlarge
from mixlab.metrics.macs import macs_by_part
from mixlab.models.build import build
from mixlab.models.config import ModelConfig
from mixlab.models.released import find_release

PICO = mixlab.list_models("*_pico")
SMALL: dict[str, Any] = {"num_classes": 5, "width": 16, "auxiliary_width": 8}
# millions of parameters on ADE20K without the auxiliary head: Vision-LSTM Table 2, HyenaPixel Table 5, MetaFormer
# Table 10 (which counted the auxiliary head: with it ours round to the table's figures)
PARAMETERS = {
    **{"vil_tiny": (192, 11), "vil_small": (384, 42), "vil_base": (384, 115), "hpx_former_s18": (512, 56)},
    **{"convformer_s18": (512, 54), "caformer_s18": (512, 54), "convformer_s36": (512, 67)},
    **{"caformer_s36": (512, 67), "convformer_m36": (512, 85), "caformer_m36": (512, 84)},
}
# thousand millions of multiply-accumulates at 512 x 2048: MetaFormer Table 10, HyenaPixel Table 5
MACS = {
    **{"convformer_s18": 925, "caformer_s18": 1024, "hpx_former_s18": 928, "convformer_s36": 1003},
    **{"caformer_s36": 1197, "convformer_m36": 1113, "caformer_m36": 1346},
}


def full_size(name: str, width: int = 512) -> Segmenter:
    with torch.device("meta"):
        return create_segmenter(name, num_classes=150, width=width)


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def batch(images: int = 2, size: tuple[int, int] = (72, 104)) -> tuple[Tensor, Tensor]:
    return torch.randn(images, 3, *size), torch.randint(0, 5, (images, *size))


@pytest.mark.parametrize("decoder", ["upernet", "linear"])
@pytest.mark.parametrize("name", PICO)
def test_every_family_trains_and_predicts_at_a_size_that_is_not_square(name: str, decoder: Any) -> None:
    model = create_segmenter(name, decoder, dropout=0.0, **SMALL)
    images, masks = batch()
    before = sum(model(images, masks).values())
    before.backward()
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trained.values())
    torch.optim.AdamW(trained.values(), 1e-4).step()
    with torch.no_grad():
        assert sum(model(images, masks).values()) < before
        assert model.eval()(images).shape == (2, 5, 72, 104)


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_parameters_are_the_papers(name: str) -> None:
    width, millions = PARAMETERS[name]
    model = full_size(name, width)
    assert model.auxiliary is not None
    ours = (count(model) - count(model.auxiliary)) / 1e6
    assert ours == pytest.approx(millions, rel=0.03)
    if name.startswith(("convformer", "caformer")):
        assert count(model) / 1e6 == pytest.approx(millions, abs=0.55)


@pytest.mark.parametrize("name", sorted(MACS))
def test_macs_are_the_papers(name: str) -> None:
    assert mixlab.macs(full_size(name), (512, 2048)) / 1e9 == pytest.approx(MACS[name], rel=0.005)


def test_macs_tell_the_backbone_from_what_is_built_on_it() -> None:
    model = create_segmenter("caformer_pico", **SMALL)
    whole, alone = macs_by_part(model, (64, 96)), macs_by_part(model.backbone, (64, 96))
    assert whole["head"] > alone.pop("head")
    assert {part: whole[part] for part in alone} == alone


def test_the_decoder_computes_what_transformers_computes() -> None:
    from transformers import UperNetConfig
    from transformers.models.upernet.modeling_upernet import UperNetHead

    channels, maps = (8, 12, 16, 20), [torch.randn(2, c, 24 // 2**i, 32 // 2**i) for i, c in enumerate((8, 12, 16, 20))]
    theirs: Any = UperNetHead(UperNetConfig(hidden_size=16), channels)
    ours = UperNet(channels, (4, 8, 16, 32), 16)
    groups = (
        *zip((block.layers[1] for block in theirs.psp_modules.blocks), ours.pooling.parts, strict=True),
        (theirs.bottleneck, ours.pooling.fuse),
        *zip(theirs.lateral_convs, ours.lateral, strict=True),
        *zip(theirs.fpn_convs, ours.smooth, strict=True),
        (theirs.fpn_bottleneck, ours.fuse),
    )
    for source, target in groups:
        source.batch_norm.bias.data.normal_()
        target.load_state_dict(dict(zip(target.state_dict(), source.state_dict().values(), strict=True)))
    theirs.classifier = torch.nn.Identity()
    torch.testing.assert_close(ours(maps), theirs(maps), rtol=1e-4, atol=1e-5)


def test_a_pixel_stays_where_it_is_when_a_map_is_enlarged() -> None:
    ramp = torch.arange(7.0)[None, None, None].expand(1, 1, 7, 7)  # cells of 4 px, of which the last reaches beyond
    cut = enlarge(ramp, 4, 25, 25)
    assert cut.shape == (1, 1, 25, 25)
    torch.testing.assert_close(cut[0, 0, 0, 2:24], (torch.arange(2, 24) + 0.5) / 4 - 0.5)
    continued = enlarge(ramp, 4, 31, 31)
    torch.testing.assert_close(continued[..., :25, :25], cut)
    assert continued[0, 0, 0, -1] == 6


@pytest.mark.parametrize("decoder", ["upernet", "linear"])
def test_a_single_image_of_the_least_size_trains(decoder: Any) -> None:
    """The coarsest map and the pooled ones then have one value per channel, which has no variance."""
    model = create_segmenter("convformer_pico", decoder, **SMALL)
    sum(model(*batch(1, (32, 32))).values()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


def test_learned_maps_are_used_where_all_maps_have_one_stride() -> None:
    with torch.device("meta"):
        vil, conv = (create_segmenter(name, **SMALL) for name in ("vil_tiny", "convformer_s18"))
        plain = create_segmenter("vil_tiny", learned_maps=False, **SMALL)
    assert {key.split(".")[1] for key, _ in vil.maps.named_parameters() if key.startswith("steps")} == {"0", "1"}
    assert not any(key.startswith("steps") for model in (conv, plain) for key, _ in model.maps.named_parameters())


def test_norms_of_maps_have_zero_mean_over_channels() -> None:
    model = create_segmenter("caformer_pico", norms=True, **SMALL)
    assert model.norms is not None
    for level in model.norms(model.maps(torch.randn(1, 3, 64, 64))):
        assert level.mean(1).abs().max() < 1e-5


def test_what_is_ignored_teaches_nothing() -> None:
    model = create_segmenter("convformer_pico", **SMALL).eval()
    images, masks = batch()
    masks[:, :, 50:] = 255
    with torch.no_grad():
        scores = model(images)
        expected = torch.nn.functional.cross_entropy(scores[..., :50], masks[..., :50])
        torch.testing.assert_close(model(images, masks)["loss"], expected)
    nothing = model.train()(images, torch.full_like(masks, 255))
    assert {name: loss.item() for name, loss in nothing.items()} == {"loss": 0.0, "auxiliary_loss": 0.0}


def test_the_auxiliary_head_is_for_training_only() -> None:
    images, masks = batch()
    model = create_segmenter("convformer_pico", **SMALL)
    assert set(model(images, masks)) == {"loss", "auxiliary_loss"}
    assert set(model.eval()(images, masks)) == {"loss"}
    without = create_segmenter("convformer_pico", auxiliary_weight=0.0, **SMALL)
    assert without.auxiliary is None
    assert set(without(images, masks)) == {"loss"}


def test_a_segmenter_is_rebuilt_from_plain_data_and_copied() -> None:
    model = create_segmenter("vil_pico", norms=True, **SMALL).eval()
    config = SegmenterConfig.parse(json.loads(json.dumps(model.config.plain())))
    assert config == model.config
    row = json.loads(json.dumps(model.backbone.config.plain()))
    rebuilt = Segmenter(build(ModelConfig.parse(row)), config).eval()
    rebuilt.load_state_dict(model.state_dict())
    images, _ = batch(1)
    with torch.no_grad():
        assert torch.equal(rebuilt(images), model(images))
        assert torch.equal(copy.deepcopy(model)(images), model(images))


def test_layers_hold_every_parameter_once_and_end_with_the_head() -> None:
    model = create_segmenter("convformer_pico", **SMALL)
    names = [name for _, own in model.layer_order for name in own]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert "classifier.1.weight" in dict(model.layer_order)["head"]
    assert "decoder.fuse.1.weight" in model.no_decay
    assert "decoder.fuse.0.weight" not in model.no_decay


def test_weights_of_a_classifier_start_a_segmenter(tmp_path: Any) -> None:
    classifier = mixlab.create_model("convformer_pico", num_classes=7)
    mixlab.save_weights(classifier, tmp_path / "model.safetensors")
    for backbone in ("convformer_pico", mixlab.create_model("convformer_pico", num_classes=3)):
        model = create_segmenter(backbone, weights=tmp_path / "model.safetensors", **SMALL)
        assert model.backbone.config.num_classes == 0
        for name, value in model.backbone.state_dict().items():
            assert torch.equal(value, classifier.state_dict()[name])


def test_options_of_the_backbone_are_its_config() -> None:
    mixers = ["sepconv", "sepconv", "window_attention", "window_attention"]
    model = create_segmenter("caformer_pico", backbone_options={"mixers": mixers, "drop_path": 0.4}, **SMALL)
    assert [mixer.name for mixer in model.backbone.config.mixers] == mixers
    assert model.backbone.config.drop_path.rate == 0.4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, "width"),
        ({"num_classes": 1}, "2 to 255 classes"),
        ({"decoder": "fcn"}, "'upernet', 'linear'"),
        ({"depth": 3}, "Unknown option 'depth'"),
        ({"auxiliary_map": 4}, "auxiliary_map from 0 to 3"),
        ({"decoder": "linear", "norms": True}, "linear decoder"),
    ],
)
def test_what_does_not_fit_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_segmenter("convformer_pico", **{**SMALL, **options})


def test_a_wrong_backbone_or_mask_is_an_error() -> None:
    with pytest.raises(ConfigError, match="backbone_options change a named backbone"):
        create_segmenter(mixlab.create_model("convformer_pico"), backbone_options={"drop_path": 0.1}, **SMALL)
    members = [mixlab.create_model("convformer_pico") for _ in range(2)]
    with pytest.raises(ConfigError, match="got a Ensemble"):
        create_segmenter(mixlab.Ensemble(members), **SMALL)  # type: ignore[arg-type]
    model = create_segmenter("convformer_pico", **SMALL)
    with pytest.raises(DataError, match=r"shape \(2, 72, 104\)"):
        model(batch()[0], batch()[1][:, :70])


def test_predictions_of_balanced_classes_are_as_frequent_as_the_classes() -> None:
    """Trained to the end, scores that see nothing say how often each class is."""
    masks = torch.tensor([0] * 90 + [1] * 9 + [2]).view(1, 10, 10)
    scores = torch.zeros(1, 3, 1, 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([scores], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = pixel_loss(scores.expand(1, 3, 10, 10), masks, 0.75)
        loss.backward()
        return loss

    optimizer.step(closure)
    model = create_segmenter("convformer_pico", **SMALL | {"num_classes": 3}, balance=0.75)
    shifted = scores[0].detach() + model.shift(class_counts(masks, 3).float())
    torch.testing.assert_close(shifted.flatten().softmax(0), torch.tensor([0.90, 0.09, 0.01]), atol=1e-3, rtol=0)


def test_what_was_seen_in_training_shifts_predictions_and_is_kept_with_the_weights() -> None:
    model = create_segmenter("convformer_pico", **SMALL, balance=0.5)
    images, masks = batch()
    fresh = copy.deepcopy(model).eval()(images)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin(images, masks)
    model.load_state_dict(model.state_dict() | {"seen": twin.seen})
    missing = 0.5 * masks.flatten().bincount(minlength=5).log()
    torch.testing.assert_close(model.eval()(images) - fresh, missing[None, :, None, None].expand_as(fresh))


def test_public_weights_go_into_the_backbone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIXLAB_CACHE", str(tmp_path))
    file = find_release("deit_tiny").local
    file.parent.mkdir()
    classifier = mixlab.create_model("deit_tiny")
    mixlab.save_weights(classifier, file)
    with pytest.warns(UserWarning, match="No hash is known"):
        model = create_segmenter("deit_tiny", weights="released", **SMALL)
    name = "stages.0.blocks.3.token.branches.0.mixer.qkv.weight"
    assert torch.equal(model.backbone.get_parameter(name), classifier.get_parameter(name))
    with pytest.raises(ConfigError, match="No public checkpoint of 'vil_pico'"):
        create_segmenter("vil_pico", weights="released", **SMALL)
