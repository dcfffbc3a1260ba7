"""Any model of timm under every head."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import mixlab
from mixlab.core.errors import ConfigError, WeightsError
from mixlab.dense.files import load_dense
from mixlab.dense.timm_maps import TimmMaps, timm_maps
from mixlab.evals.cost.whole_task import whole_task
from mixlab.training.optimizer import parameter_groups
from mixlab.training.recipe import Optimizer

SMALL: dict[str, Any] = {"width": 32, "auxiliary_width": 16, "image_size": 64}
KINDS = {
    "resnet10t": ((4, 8, 16, 32), (64, 128, 256, 512)),
    "convnext_atto": ((4, 8, 16, 32), (40, 80, 160, 320)),
    "swin_tiny_patch4_window7_224": ((4, 8, 16, 32), (96, 192, 384, 768)),
    "deit_tiny_patch16_224": ((16, 16, 16, 16), (192, 192, 192, 192)),
    "poolformer_s12": ((4, 8, 16, 32), (64, 128, 320, 512)),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_maps_have_their_strides_at_any_image_size(name: str) -> None:
    model = timm_maps(f"timm:{name}").eval()
    assert (model.strides, model.channels) == KINDS[name]
    with torch.no_grad():
        maps = model.pyramid(torch.randn(2, 3, 70, 101))
    for level, stride, channels in zip(maps, model.strides, model.channels, strict=True):
        assert level.shape == (2, channels, -(-70 // stride), -(-101 // stride))
    listed = [name for _, names in model.layer_order for name in names]
    assert sorted(listed) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize("name", ["resnet10t", "deit_tiny_patch16_224"])
def test_the_maps_are_those_of_timm(name: str) -> None:
    model = timm_maps(f"timm:{name}", {"image_size": 64}).eval()
    sizes = {"dynamic_img_size": True} if name.startswith("deit") else {}
    peer = timm.create_model(name, **({"img_size": 64, **sizes} if sizes else {})).eval()
    peer.load_state_dict(model.inner.state_dict(), strict=False)
    image = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        theirs = peer.forward_intermediates(image, intermediates_only=True)
        wanted = [theirs[index] for index in ((2, 5, 8, 11) if sizes else (1, 2, 3, 4))]
        for ours, expected in zip(model.pyramid(image), wanted, strict=True):
            torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("kind", ["upernet", "linear"])
def test_a_segmenter_on_a_model_of_timm_trains_and_comes_back_from_its_file(kind: Any, tmp_path: Path) -> None:
    options = {"drop_path": {"rate": 0.1}}
    model = mixlab.create_segmenter("timm:convnext_atto", kind, num_classes=3, backbone_options=options, **SMALL)
    losses = model(torch.randn(2, 3, 64, 64), torch.randint(3, (2, 64, 64)))
    sum(losses.values()).backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not without
    mixlab.save_weights(model, tmp_path / "m.safetensors")
    back = load_dense(tmp_path / "m.safetensors").eval()
    assert back.backbone.config.name == "timm:convnext_atto"
    image = torch.randn(1, 3, 70, 64)
    with torch.no_grad():
        torch.testing.assert_close(back(image), model.eval()(image))


@pytest.mark.parametrize("kind", ["mask_rcnn", "cascade_mask_rcnn", "deformable_detr"])
def test_every_detector_is_built_on_a_model_of_timm(kind: Any) -> None:
    options = {"deformable": {"encoder_layers": 1, "decoder_layers": 1}, "queries": 8}
    more: dict[str, Any] = {"masks": False, **options} if kind == "deformable_detr" else {}
    model = mixlab.create_detector(
        "timm:resnet10t", kind, num_classes=3, width=64, shorter=64, longer=96, **more
    ).eval()
    with torch.no_grad():
        found = model([torch.randn(3, 64, 80)])
    assert {"boxes", "scores", "labels"} <= set(found[0])


def test_layers_decay_as_timm_orders_them() -> None:
    model = mixlab.create_segmenter("timm:convnext_atto", num_classes=3, **SMALL)
    groups = parameter_groups(model, Optimizer(lr=1.0, layer_decay=0.5))
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    names = dict(model.named_parameters())
    stem = next(p for name, p in names.items() if ".stem_0.weight" in name or ".stem.0.weight" in name)
    head = next(p for name, p in names.items() if "backbone" not in name)
    assert scale[id(stem)] == min(scale.values()) < max(scale.values()) == scale[id(head)] == 1


def test_weights_of_timm_fill_the_maps(tmp_path: Path) -> None:
    peer = timm.create_model("resnet10t", num_classes=7)
    torch.save(peer.state_dict(), tmp_path / "peer.pth")
    model = timm_maps("timm:resnet10t", weights=tmp_path / "peer.pth")
    assert torch.equal(model.inner.state_dict()["layer1.0.conv1.weight"], peer.state_dict()["layer1.0.conv1.weight"])
    with pytest.raises(WeightsError, match="does not fit"):
        timm_maps("timm:convnext_atto", weights=tmp_path / "peer.pth")
    with pytest.raises(WeightsError, match="does not exist"):
        timm_maps("timm:resnet10t", weights=tmp_path / "none.pth")


def test_a_whole_task_on_a_model_of_timm_is_measured_by_name() -> None:
    model = whole_task("upernet:timm:resnet10t", (64, 64))
    assert isinstance(model.get_submodule("maps.backbone"), TimmMaps)
    assert mixlab.macs(model, 64) > 1e8


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("timm:resnet51", {}, "Did you mean"),
        ("timm:resnet10t", {"mixers": "pool"}, "no option 'mixers'"),
        ("timm:vgg11", {}, "gives no maps"),
        ("timm:levit_128", {}, "strides of 4, 8, 16 and 32"),
    ],
)
def test_what_timm_cannot_give_is_explained(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        timm_maps(name, options)
