from typing import Any

import pytest
import torch

import mixlab

MODELS = {"convformer_s4": True, "caformer_pico": False, "identityformer_s_iso": False}


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("size", [(64, 96), (97, 131)])
def test_any_pyramid_comes_to_strides_4_8_16_32(name: str, size: tuple[int, int]) -> None:
    adapter = mixlab.PyramidAdapter(mixlab.create_model(name, num_classes=0).eval())
    maps = adapter(torch.randn(1, 3, *size))
    assert adapter.strides == (4, 8, 16, 32)
    for level, stride, channels in zip(maps, adapter.strides, adapter.channels, strict=True):
        assert level.shape[:2] == (1, channels)
        for side, pixels in zip(level.shape[2:], size, strict=True):
            assert abs(side - pixels / stride) <= 1


def test_a_pixel_stays_where_it_is_when_the_patches_reach_beyond_the_image() -> None:
    """97 px make 7 patches of 16, which cover 112 px: the map must not be squeezed into 97."""
    model = mixlab.create_model("identityformer_s_iso", norm="layer", depths=[1]).eval()
    plain, banded = torch.zeros(1, 3, 97, 97), torch.zeros(1, 3, 97, 97)
    banded[:, :, 80:96] = 3  # the sixth row of patches
    adapter = mixlab.PyramidAdapter(model)
    with torch.no_grad():
        change = (adapter(plain)[0] - adapter(banded)[0]).abs().sum((0, 1, 3))
    centre = (change * (torch.arange(25) * 4 + 2)).sum() / change.sum()
    assert centre.item() == pytest.approx(88, abs=2)


def test_a_map_at_its_stride_is_passed_on_untouched() -> None:
    model, image = mixlab.create_model("convformer_s4").eval(), torch.randn(1, 3, 64, 64)
    for adapted, native in zip(mixlab.PyramidAdapter(model)(image), model.pyramid(image), strict=True):
        assert torch.equal(adapted, native)


def test_taps_of_a_single_stage_are_maps_after_pairs_4_6_8_and_12() -> None:
    model = mixlab.create_model("vil_tiny", dims=[8]).eval()
    assert model.pyramid_names == tuple(f"stages.0.blocks.{index}" for index in (7, 11, 15, 23))
    assert model.strides == (16,) * 4
    assert model.channels == (8,) * 4
    image = torch.randn(1, 3, 64, 80)
    with torch.no_grad():
        maps, named = model.pyramid(image), model.intermediates(image, model.pyramid_names)
    for level, name in zip(maps, model.pyramid_names, strict=True):
        assert level.shape == (1, 8, 4, 5)
        assert torch.equal(level, named[name])


@pytest.mark.parametrize("name", ["vil_tiny", "deit3_tiny", "sequencer2d_s", "caformer_s18"])
def test_a_learned_adapter_trains_and_keeps_the_strides(name: str) -> None:
    sizes: dict[str, Any] = {"dims": [16], "depths": [12]} if name[0] in "vd" else {"dims": [16] * 4, "depths": [1] * 4}
    adapter = mixlab.PyramidAdapter(mixlab.create_model(name, **sizes), learned=True)
    maps = adapter(torch.randn(2, 3, 64, 96))
    for level, stride in zip(maps, (4, 8, 16, 32), strict=True):
        assert level.shape == (2, 16, 64 // stride, 96 // stride)
    sum(level.square().sum() for level in maps).backward()
    assert all(parameter.grad is not None for parameter in adapter.steps.parameters())
    kinds = [type(step).__name__ for step in adapter.steps]
    if name[0] in "vd":
        assert kinds == ["Sequential", "ConvTranspose2d", "Identity", "MaxPool2d"]
