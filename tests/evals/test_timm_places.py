from collections.abc import Iterator

import pytest
import timm
import torch
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn

from mixlab.core.errors import ConfigError
from mixlab.evals.inspect.erf import find_places
from mixlab.evals.subjects import open_subject
from mixlab.evals.timm_places import block_names, feature_names, grid_of, is_grid, maps_at, stage_names

IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", autouse=True)
def quietly() -> Iterator[None]:
    with torch.no_grad():
        yield


def swin() -> nn.Module:
    model: nn.Module = SwinTransformer(
        img_size=64, embed_dim=16, depths=(1, 2), num_heads=(1, 2), window_size=8, num_classes=2
    )
    return model.eval()


def built(name: str, **options: object) -> nn.Module:
    model: nn.Module = timm.create_model(name, num_classes=2, **options)
    return model.eval()


@pytest.fixture(scope="module")
def resnet() -> nn.Module:
    return built("test_resnet")


# -- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("resnet50", "layer1.0", "layer4.2"),
        ("convnext_tiny", "stages.0.blocks.0", "stages.3.blocks.2"),
        ("swin_tiny_patch4_window7_224", "layers.0.blocks.0", "layers.3.blocks.1"),
        ("deit_small_patch16_224", "blocks.0", "blocks.11"),
        ("efficientnet_b0", "blocks.0.0", "blocks.6.0"),
        ("regnety_008", "s1.b1", "s4.b2"),
        ("vovnet39a", "stages.0.blocks.0", "stages.3.blocks.1"),
    ],
)
def test_the_first_and_the_last_block(name: str, first: str, last: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    assert find_places(model, [], ["first", "last"]) == [first, last]
    assert find_places(model, [], ["first-and-last"]) == [first, last]


def test_the_stem_is_no_stage(resnet: nn.Module) -> None:
    assert feature_names(resnet)[0] == "act1"
    assert stage_names(resnet) == ["layer1", "layer2", "layer3", "layer4"]


def test_a_model_without_lists_of_blocks_offers_its_features() -> None:
    with torch.device("meta"):
        model = timm.create_model("inception_v3")
    assert block_names(model) == []
    assert find_places(model, [], ["last"]) == ["Mixed_7c"]


# -- maps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["test_resnet", "test_convnext", "test_efficientnet", "test_vit", "swin"])
def test_hooked_features_are_those_that_timm_gives(name: str) -> None:
    model = swin() if name == "swin" else built(name, **({"img_size": 64} if name == "test_vit" else {}))
    expected = model.forward_intermediates(IMAGES, intermediates_only=True, output_fmt="NCHW")  # type: ignore[operator]
    found = maps_at(model, IMAGES, feature_names(model))
    torch.testing.assert_close(list(found.values()), expected)


def test_the_map_of_a_block_is_what_the_block_gives(resnet: nn.Module) -> None:
    parts = ("conv1", "bn1", "act1", "maxpool")
    x = IMAGES
    for part in (*parts, "layer1"):
        x = getattr(resnet, part)(x) if part != "layer1" else resnet.layer1[0](x)  # type: ignore[index,operator]
    torch.testing.assert_close(maps_at(resnet, IMAGES, ["layer1.0"])["layer1.0"], x)


def test_a_layer_is_seen_before_the_next_one_overwrites_its_output() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True))
    assert (maps_at(model, IMAGES, ["0"])["0"] < 0).any()


def test_gradients_reach_the_images_from_within(resnet: nn.Module) -> None:
    with torch.enable_grad():
        images = IMAGES.clone().requires_grad_()
        maps_at(resnet, images, ["layer1.0"])["layer1.0"][:, :, 8, 8].sum().backward()
    assert images.grad is not None
    seen = images.grad.abs().sum((0, 1)) > 0
    assert 0 < int(seen.sum()) < seen.numel()  # two convolutions are local


def test_tokens_of_an_image_that_is_not_square_lose_their_class_token() -> None:
    model = built("test_vit", dynamic_img_size=True)
    images = torch.randn(2, 3, 64, 96)
    tokens: list[Tensor] = []
    handle = model.blocks[0].register_forward_hook(lambda module, inputs, output: tokens.append(output))  # type: ignore[index,union-attr]
    found = maps_at(model, images, ["blocks.0"])["blocks.0"]
    handle.remove()
    assert found.shape == (2, 64, 4, 6)
    torch.testing.assert_close(found[:, :, 1, 2], tokens[0][:, 1 + 6 + 2])


def test_channels_last_maps_are_turned() -> None:
    found = maps_at(swin(), IMAGES, ["layers.0.blocks.0", "layers.1.blocks.1"])
    assert [tuple(one.shape) for one in found.values()] == [(2, 16, 16, 16), (2, 32, 8, 8)]


def test_a_grid_covers_the_image_with_cells_of_whole_pixels() -> None:
    assert grid_of(24, (64, 96)) == (4, 6)
    assert grid_of(196, (224, 224)) == (14, 14)
    assert grid_of(197, (224, 224)) is None
    assert is_grid(35, 35, (299, 299))  # Inception's convolutions are not padded
    assert not is_grid(197, 197, (224, 224))  # attention weights


# -- errors --------------------------------------------------------------------------------------


def test_no_map_is_an_error_that_says_where_maps_are(resnet: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"'fc' of timm's 'test_resnet' gives 2 x 2 .*no map.*Known: act1, layer1, "):
        maps_at(resnet, IMAGES, ["fc"])
    with pytest.raises(ConfigError, match=r"attn' of .*no map.*layers\.0\.blocks\.0"):
        maps_at(swin(), IMAGES, ["layers.0.blocks.0.attn"])


def test_names_that_are_not_there_have_near_misses(resnet: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"no module 'layer1\.O'.*'layer1\.0'"):
        find_places(resnet, [], ["layer1.O"])
    with pytest.raises(ConfigError, match="'last'"):
        find_places(resnet, [], ["lasst"])


def test_modules_that_run_never_or_twice_are_refused() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.unused = nn.ReLU(), nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.act(x) - 1)

    with pytest.raises(ConfigError, match="runs 2 times"):
        maps_at(Shared(), IMAGES, ["act"])
    with pytest.raises(ConfigError, match="takes no part"):
        maps_at(Shared(), IMAGES, ["unused"])


def test_hooks_are_gone_afterwards(resnet: nn.Module) -> None:
    maps_at(resnet, IMAGES, ["layer1.0"])
    assert not any(module._forward_hooks for module in resnet.modules())


def test_a_subject_offers_stages_and_blocks_and_gives_any_module() -> None:
    subject = open_subject("timm:test_resnet", num_classes=2)
    assert subject.intermediate_names[:4] == ("act1", "layer1.0", "layer1", "layer2.0")
    assert subject.intermediates(IMAGES, ["layer1.0.conv2"])["layer1.0.conv2"].shape[2:] == (16, 16)
