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


def test_a_map_at_its_stride_is_passed_on_untouched() -> None:
    model, image = mixlab.create_model("convformer_s4").eval(), torch.randn(1, 3, 64, 64)
    for adapted, native in zip(mixlab.PyramidAdapter(model)(image), model.pyramid(image), strict=True):
        assert torch.equal(adapted, native)
