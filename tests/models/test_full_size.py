"""Every model at its published size: slow, run by `make parity`."""

from typing import Any

import pytest
import torch

import mixlab
from mixlab.models.zoo import rows

pytestmark = pytest.mark.heavy
IN_TIMM = ["convformer", "caformer", "poolformerv2", "sequencer2d", "coat"]
NAMES = [name for name in mixlab.list_models() if not name.endswith("_pico")]
NOT_IN_TIMM = ["convformer_s4", "sequencer2d_l_x1_3", *mixlab.list_models("sequencer2d_s_*")]
PEERS = [name for name in NAMES if name.split("_")[0] in IN_TIMM and name not in NOT_IN_TIMM]


@pytest.mark.parametrize("name", PEERS)
def test_logits_equal_live_timm(name: str) -> None:
    import timm

    head: dict[str, Any] = {"head": {"eps": 1e-6}} if rows()[name].get("head") == "mlp" else {}
    peer, image = timm.create_model(name).eval(), torch.randn(1, 3, 224, 224)
    for parameter in peer.get_classifier().parameters():  # Sequencer's starts at zero
        torch.nn.init.normal_(parameter, std=0.02)
    for overrides, bound in (({}, 1e-3), (head, 1e-4)):  # timm's head norm has eps 1e-6, the authors' 1e-5
        model = mixlab.create_model(name, **overrides).eval()
        mixlab.load_weights(model, peer.state_dict())
        with torch.no_grad():
            expected = peer(image)
            assert (model(image) - expected).abs().max() < bound * expected.std()


@pytest.mark.parametrize("name", mixlab.list_models("deit*"))
def test_plain_transformers_equal_live_timm(name: str) -> None:
    import timm

    family, size = name.split("_")
    kind = {"no_embed_class": True, "init_values": 1e-4} if family == "deit3" else {}
    peer, image = timm.create_model(f"deit_{size}_patch16_224", **kind).eval(), torch.randn(1, 3, 224, 224)
    model = mixlab.create_model(name).eval()
    mixlab.load_weights(model, peer.state_dict())
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in peer.parameters())
    with torch.no_grad():
        expected = peer(image)
        assert (model(image) - expected).abs().max() < 1e-4 * expected.std()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [(224, 224), (97, 131), (384, 256), (256, 320)])
def test_forward_backward_and_pyramid(name: str, size: tuple[int, int]) -> None:
    model, image = mixlab.create_model(name), torch.randn(1, 3, *size)
    logits = model(image)
    (logits.square().sum() + model.embed(image).square().sum()).backward()  # a classifier may start at zero
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    with torch.no_grad():
        maps = model.eval().pyramid(image)
    assert len(maps) == (len(model.config.taps) or len(model.config.dims))
    for level, stride, channels in zip(maps, model.strides, model.channels, strict=True):
        assert level.shape[:2] == (1, channels)
        assert all(abs(side - pixels / stride) <= 1 for side, pixels in zip(level.shape[2:], size, strict=True))
