from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoBackbone, AutoConfig, UperNetConfig, UperNetForSemanticSegmentation

import mixlab
from mixlab.dense.hugging_face import MixlabBackbone, MixlabBackboneConfig, backbone_config

PICO = mixlab.list_models("*_pico")
CHANNELS = [32, 64, 96, 128]  # of convformer_pico


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and all buffers, also those that no file holds."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def upernet() -> UperNetForSemanticSegmentation:
    backbone = backbone_config("convformer_pico", levels="adapted", drop_path=0.1)
    return UperNetForSemanticSegmentation(
        UperNetConfig(backbone_config=backbone, hidden_size=16, use_auxiliary_head=False)
    )


@pytest.mark.parametrize("name", PICO)
def test_the_maps_and_the_initialization_are_our_own(name: str) -> None:
    torch.manual_seed(0)
    wrapped = AutoBackbone.from_config(backbone_config(name)).eval()
    torch.manual_seed(0)
    own = mixlab.create_model(name, num_classes=0).eval()
    assert_same(tensors(wrapped.backbone), tensors(own))
    image = torch.randn(1, 3, 72, 104)
    with torch.no_grad():
        maps, expected = wrapped(image).feature_maps, own.pyramid(image)
    assert all(torch.equal(*pair) for pair in zip(maps, expected, strict=True))
    assert wrapped.channels == list(own.channels)


@pytest.mark.parametrize(("name", "levels"), [*((name, "native") for name in PICO), ("vil_pico", "learned")])
def test_a_saved_backbone_comes_back_bit_by_bit(name: str, levels: Any, tmp_path: Path) -> None:
    model = MixlabBackbone(backbone_config(name, levels=levels, drop_path=0.2))
    model.save_pretrained(tmp_path)
    loaded = MixlabBackbone.from_pretrained(tmp_path)
    assert_same(tensors(loaded), tensors(model))
    assert loaded.config.architecture == model.config.architecture
    assert AutoConfig.from_pretrained(tmp_path).levels == levels


@pytest.mark.parametrize("name", ["convformer_pico", "vil_pico"])
def test_adapted_maps_have_strides_4_8_16_32(name: str) -> None:
    model = MixlabBackbone(backbone_config(name, levels="adapted"))
    maps = model(torch.randn(1, 3, 64, 96)).feature_maps
    assert [tuple(level.shape[1:]) for level in maps] == [
        (channels, 64 // stride, 96 // stride) for channels, stride in zip(model.channels, (4, 8, 16, 32), strict=True)
    ]


def test_maps_are_chosen_by_index_or_name_and_all_are_hidden_states() -> None:
    by_index = backbone_config("convformer_pico", out_indices=[1, 3])
    assert by_index.out_features == ["stage2", "stage4"]
    assert backbone_config("convformer_pico", out_features=["stage2", "stage4"]).out_indices == [1, 3]
    model = MixlabBackbone(by_index)
    assert model.channels == by_index.hidden_sizes == [CHANNELS[1], CHANNELS[3]]
    output = model(torch.randn(1, 3, 64, 64), output_hidden_states=True)
    assert [level.shape[1] for level in output.feature_maps] == model.channels
    assert [level.shape[1] for level in output.hidden_states] == CHANNELS
    (only,) = model(torch.randn(1, 3, 64, 64), return_dict=False)
    assert len(only) == 2


def test_a_head_comes_back_with_its_backbone(tmp_path: Path) -> None:
    model = upernet().eval()
    model.save_pretrained(tmp_path)
    loaded = UperNetForSemanticSegmentation.from_pretrained(tmp_path).eval()
    assert_same(tensors(loaded), tensors(model))
    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(loaded(image).logits, model(image).logits)


def test_what_a_file_lacks_gets_our_initialization(tmp_path: Path) -> None:
    model = upernet()
    state = {name: value for name, value in model.state_dict().items() if not name.startswith("backbone.")}
    model.save_pretrained(tmp_path, state_dict=state)
    torch.manual_seed(0)
    fresh = AutoBackbone.from_config(model.config.backbone_config)
    torch.manual_seed(0)
    loaded = UperNetForSemanticSegmentation.from_pretrained(tmp_path)
    assert all(value.isfinite().all() for value in tensors(loaded).values())
    for name, value in tensors(fresh).items():
        other = tensors(loaded.backbone)[name]
        assert torch.allclose(other.float().std(correction=0), value.float().std(correction=0), rtol=0.2, atol=1e-3), (
            name
        )


def test_weights_of_a_classifier_go_into_a_head(tmp_path: Path) -> None:
    trained = mixlab.create_model("convformer_pico", num_classes=10)
    mixlab.save_weights(trained, tmp_path / "trained.safetensors")
    head = upernet()
    mixlab.load_weights(head.backbone.backbone, tmp_path / "trained.safetensors", replace_classifier=True)
    assert_same(dict(head.backbone.backbone.stem.named_parameters()), dict(trained.stem.named_parameters()))


ONE_MAP = {"encoder_layers": 1, "encoder_ffn_dim": 32, "out_indices": [3]}
THREE_MAPS = {
    "encoder_in_channels": CHANNELS[1:],
    "encoder_hidden_dim": 32,
    "decoder_in_channels": [32] * 3,
    "encoder_ffn_dim": 32,
    "out_indices": [1, 2, 3],
}


@pytest.mark.parametrize(
    ("head", "settings"),
    [
        ("Detr", ONE_MAP),
        ("ConditionalDetr", ONE_MAP),
        ("DabDetr", ONE_MAP),
        ("TableTransformer", ONE_MAP),
        ("RTDetr", THREE_MAPS),
        ("RTDetrV2", THREE_MAPS),
        ("DFine", THREE_MAPS),
        ("Deimv2", THREE_MAPS),
    ],
)
def test_heads_that_detect_train_a_step(head: str, settings: dict[str, Any]) -> None:
    settings = dict(settings)
    backbone = backbone_config("convformer_pico", levels="adapted", out_indices=settings.pop("out_indices"))
    width = "hidden_size" if head == "DabDetr" else "d_model"
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    small = {width: 32, "decoder_layers": 2, "decoder_ffn_dim": 32, "num_queries": 10, "num_labels": 3, **heads}
    config = getattr(transformers, f"{head}Config")(backbone_config=backbone, **small, **settings)
    model = getattr(transformers, f"{head}ForObjectDetection")(config)
    labels = [{"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.3, 0.3]])}]
    model(torch.randn(1, 3, 64, 96), labels=labels).loss.backward()
    (wrapped,) = (part for part in model.modules() if isinstance(part, MixlabBackbone))
    assert all(parameter.grad is not None for parameter in wrapped.backbone.stem.parameters())


def test_bad_settings_are_named() -> None:
    with pytest.raises(mixlab.MixlabError, match="native, adapted, learned"):
        backbone_config("convformer_pico", levels="fine")  # type: ignore[arg-type]
    with pytest.raises(mixlab.MixlabError, match="convformer_pico"):
        backbone_config("convformer_piko")
    with pytest.raises(mixlab.MixlabError, match="backbone_config"):
        MixlabBackbone(MixlabBackboneConfig())
    with pytest.raises(mixlab.MixlabError, match="explain"):
        MixlabBackbone(backbone_config("convformer_pico"))(torch.randn(1, 3, 64, 64), output_attentions=True)
