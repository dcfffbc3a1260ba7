import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mixlab
from mixlab.core.choices import NoOptions
from mixlab.core.errors import ConfigError, ImageError
from mixlab.core.grid import Grid
from mixlab.deploy import compile_blocks
from mixlab.models.heads import POOLS, pool
from mixlab.models.layers import Mlp
from mixlab.models.mixers import MIXERS, BlockParts, Mixer, Shared, StageParts

SMALL: dict[str, Any] = {"dims": [16, 24, 32, 40], "depths": [1, 2, 2, 1], "num_classes": 7, "image_size": 64}
# one small model per group of the family, with everything else as the row says
ROWS = ["identityformer_s12", "randformer_s12", "poolformerv2_s12", "convformer_s18", "caformer_s18"]
ISOTROPIC = ["identityformer_s_iso", "identityformer_s_iso_convstem", "vil_tiny", "deit_tiny", "deit3_tiny"]


def small(name: str) -> mixlab.Backbone:
    if name in ISOTROPIC:
        return mixlab.create_model(name, dims=[32], depths=[2], num_classes=7, image_size=64)
    return mixlab.create_model(name, **SMALL)


@pytest.mark.parametrize("name", ROWS + ISOTROPIC)
@pytest.mark.parametrize("size", [(64, 64), (33, 57), (97, 131)])
def test_forward_and_backward_at_any_size(name: str, size: tuple[int, int]) -> None:
    model, image = small(name), torch.randn(2, 3, *size, requires_grad=True)
    logits = model(image)
    assert logits.shape == (2, 7)
    logits.square().sum().backward()
    assert image.grad is not None
    assert image.grad.isfinite().all()
    assert image.grad.abs().sum() > 0
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


@settings(max_examples=15, deadline=None)
@given(height=st.integers(32, 140), width=st.integers(32, 140))
def test_the_pyramid_has_the_strides_and_channels_it_states(height: int, width: int) -> None:
    model = mixlab.create_model("caformer_s18", **SMALL).eval()
    assert model.strides == (4, 8, 16, 32)
    maps = model.pyramid(torch.randn(1, 3, height, width))
    for level, stride, channels in zip(maps, model.strides, model.channels, strict=True):
        assert level.shape[:2] == (1, channels)
        assert abs(level.shape[2] - height / stride) <= 1
        assert abs(level.shape[3] - width / stride) <= 1


def test_pyramid_maps_lie_over_the_image() -> None:
    """A change in the bottom right corner of the image changes the bottom right corner of a local model's map."""
    model = mixlab.create_model("convformer_pico").eval()
    image = torch.zeros(1, 3, 64, 96)
    changed = image.clone()
    changed[:, :, -2:, -2:] = 5
    moved = (model.pyramid(image)[0] - model.pyramid(changed)[0]).abs().sum(1)[0]
    assert moved.shape == (32, 48)
    assert moved[-1, -1] > 0
    assert (moved[:16] == 0).all()
    assert (moved[:, :24] == 0).all()


def test_logits_are_the_head_over_the_embedding() -> None:
    model, image = small("caformer_s18").eval(), torch.randn(2, 3, 64, 64)
    embedding = model.embed(image)
    assert embedding.shape == (2, 40)
    torch.testing.assert_close(model.head(embedding), model(image))
    torch.testing.assert_close(embedding, model.readout.norms[0](model.pyramid(image)[-1].mean((2, 3))))


def test_norm_before_the_pool_is_an_option() -> None:
    model = mixlab.create_model("caformer_s18", final_norm="before_pool", **SMALL).eval()
    image = torch.randn(1, 3, 64, 64)
    tokens, _ = model.features(image)[-1]
    torch.testing.assert_close(model.embed(image), model.readout.norms[0](tokens).mean(1))


def test_intermediates_come_by_name_in_the_order_asked_for() -> None:
    model, image = small("convformer_s18").eval(), torch.randn(1, 3, 64, 64)
    found = model.intermediates(image, ["stages.3", "stem", "stages.1.blocks.0"])
    assert {name: tuple(map_.shape) for name, map_ in found.items()} == {
        "stages.3": (1, 40, 2, 2),
        "stem": (1, 16, 16, 16),
        "stages.1.blocks.0": (1, 24, 8, 8),
    }
    torch.testing.assert_close(found["stages.3"], model.pyramid(image)[-1])
    with pytest.raises(ConfigError, match=r"no intermediate 'stage.1'. Did you mean 'stages.1'"):
        model.intermediates(image, ["stage.1"])


@pytest.mark.parametrize("name", ["convformer_s18", "identityformer_s12"])
def test_reset_classifier_replaces_only_the_last_layer(name: str) -> None:
    model, image = small(name).eval(), torch.randn(2, 3, 64, 64)
    embedding = model.embed(image)
    model.class_names = tuple("abcdefg")
    model.reset_classifier(3)
    assert model(image).shape == (2, 3)
    assert model.config.num_classes == 3
    assert model.class_names == ()
    torch.testing.assert_close(model.embed(image), embedding)
    model.reset_classifier(0)
    torch.testing.assert_close(model(image), embedding)
    model.reset_classifier(4)
    assert model(image).shape == (2, 4)
    for wrong, message in ((-2, "num_classes must be 0"), (3.5, "whole number"), ("10", "whole number")):
        with pytest.raises(ConfigError, match=message):
            model.reset_classifier(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ROWS)
def test_the_layer_order_holds_every_parameter_once(name: str) -> None:
    model = small(name)
    order = model.layer_order
    named = [parameter for _, parameters in order for parameter in parameters]
    assert sorted(named) == sorted(name for name, _ in model.named_parameters())
    assert [layer for layer, _ in order][:2] == ["stem", "stages.0.blocks.0"]
    assert order[-1][0] == "head"
    assert "readout.norms.0.weight" in order[-1][1]
    assert "stages.1.downsample.conv.weight" in dict(order)["stages.1.blocks.0"]


def test_weight_decay_spares_vectors_and_class_tokens() -> None:
    model = mixlab.create_model("caformer_s18", class_tokens=[0, 0, 0, 1], **SMALL)
    spared = {name for name, p in model.named_parameters() if name in model.no_decay}
    assert "stages.3.class_token" in spared
    assert "stages.0.blocks.0.channel.branches.0.mixer.act.scale" in spared
    assert "stages.2.blocks.0.token.scaling.residual" in spared
    assert all(p.ndim > 1 for name, p in model.named_parameters() if name not in spared)


def test_the_class_activation_layer_gives_a_map_of_the_image() -> None:
    model, image, seen = small("caformer_s18").eval(), torch.randn(1, 3, 64, 96), []
    layer, to_map = model.class_activation
    handle = layer.register_forward_hook(lambda module, inputs, output: seen.append(output))
    score = model(image)[0, 3]
    handle.remove()
    torch.testing.assert_close(to_map(seen[0], (64, 96)), model.pyramid(image)[-1])
    assert torch.autograd.grad(score, seen[0])[0].abs().sum() > 0


def test_blocks_explain_themselves() -> None:
    model, image = small("caformer_s18").eval(), torch.randn(2, 3, 64, 64)
    assert model.explanations["stages.0.blocks.0"] == ("kernels",)
    attention = model.explain(image, "stages.3.blocks.0")["attention"]
    torch.testing.assert_close(attention.sum(-1), torch.ones(2, 1, 4))
    with pytest.raises(ConfigError, match=r"Nothing to explain at 'stages\.9'"):
        model.explain(image, "stages.9")


def test_explaining_ignores_compiled_blocks_and_dropped_samples() -> None:
    model = mixlab.create_model("caformer_s18", **SMALL, drop_path={"rate": 0.9, "form": "skip"}).train()
    image, names = torch.randn(4, 3, 64, 64), {name: module.training for name, module in model.named_modules()}
    compile_blocks(model, backend="eager")
    model(image)
    assert model.explain(image, "stages.3.blocks.0")["attention"].shape == (4, 1, 4, 4)
    assert {name: module.training for name, module in model.named_modules()} == names


def test_class_tokens_that_never_see_the_image_are_an_error() -> None:
    with pytest.raises(ConfigError, match="never see the image"):
        mixlab.create_model("convformer_s18", class_tokens=1, pool="class_token", **SMALL)


def test_class_tokens_pool_and_end_with_their_stage() -> None:
    model = mixlab.create_model(
        "caformer_s18", class_tokens=[1, 0, 2, 1], pool="class_token", final_norm="before_pool", **SMALL
    )
    image = torch.randn(2, 3, 64, 64)
    model(image).sum().backward()
    assert model.stages[3].class_token is not None
    assert model.stages[3].class_token.grad is not None
    assert [tuple(level.shape[2:]) for level in model.pyramid(image)] == [(16, 16), (8, 8), (4, 4), (2, 2)]


def test_class_token_pooling_reads_the_class_tokens() -> None:
    model = mixlab.create_model("caformer_s18", class_tokens=1, pool="class_token", **SMALL).eval()
    tokens, grid = model.features(torch.randn(2, 3, 64, 64))[-1]
    assert torch.equal(model.readout.pool(tokens, grid), tokens[:, 0])


def gradients(model: nn.Module, image: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(image).square().sum(), [p for p in model.parameters() if p.requires_grad]))


def test_activation_checkpointing_changes_no_gradient() -> None:
    model, image = small("caformer_s18"), torch.randn(2, 3, 64, 64)
    plain = gradients(model, image)
    model.set_activation_checkpointing()
    calls: list[int] = []
    model.stages[0].blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    for ours, reference in zip(gradients(model, image), plain, strict=True):
        torch.testing.assert_close(ours, reference)
    assert len(calls) == 2  # once forward, once again for the backward pass


@pytest.mark.parametrize("name", ROWS)
def test_copies_behave_like_the_original(name: str) -> None:
    model, image = small(name).eval(), torch.randn(1, 3, 64, 64)
    expected = model(image)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other = small(name).eval()
    other.load_state_dict(torch.load(buffer, weights_only=True))
    for twin in (copy.deepcopy(model), other, pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(image), expected)


@pytest.mark.parametrize("channels", [1, 4])
def test_other_channel_counts_are_built_on_request(channels: int) -> None:
    model = mixlab.create_model("caformer_pico", in_channels=channels, num_classes=2)
    assert model(torch.randn(1, channels, 33, 57)).shape == (1, 2)
    assert len(model.config.preprocessing.mean) == channels


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (torch.zeros(1, 1, 64, 64), r"got 1 channels.*create_model\('caformer_pico', in_channels=1\)"),
        (torch.zeros(1, 4, 64, 64), "in_channels=4"),
        (torch.zeros(3, 64, 64), r"image\[None\]"),
        (torch.zeros(1, 64, 64, 3), r"image.permute\(0, 3, 1, 2\)"),
        (torch.zeros(1, 3, 64, 64, dtype=torch.float64), r"weights in torch.float32; got images in torch.float64"),
        ([[0.0]], "got a list"),
        (torch.zeros(1, 3, 31, 64), "got 31 x 64 px. Enlarge"),
        (torch.zeros(1, 3, 64, 64, dtype=torch.uint8), r"got torch.uint8. Scale to \[0, 1\]"),
    ],
)
def test_images_the_model_cannot_take(image: Tensor, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        mixlab.create_model("caformer_pico")(image)


def test_float16_autocast_stays_close_to_float32() -> None:
    model, image = small("caformer_s18").eval(), torch.randn(2, 3, 64, 64)
    expected = model(image)
    with torch.autocast("cpu", torch.float16):
        torch.testing.assert_close(model(image).float(), expected, atol=0.05 * expected.std().item(), rtol=0)


class Add(nn.Module):
    """Adds a learned share of a sine: enough to see whether it is called, saved and shared."""

    def __init__(self) -> None:
        super().__init__()
        self.amount = nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        return tokens + self.amount * tokens.sin()


class Whole(Mixer):
    mixes_channels = True
    initialises_itself = True

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        nn.init.constant_(self.linear.weight, 7.0)

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        return self.linear(tokens)


def build_whole(options: object, dim: int, depth: int, reference_grid: Grid) -> StageParts:
    shared = Add()
    return StageParts([BlockParts([Whole(dim)], Shared(shared)) for _ in range(depth)], shared)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Callable[..., mixlab.Backbone]:
    """Makes small models of that mixer, which is known for the time of one test."""
    monkeypatch.setitem(MIXERS._entries, "test_whole", (NoOptions, build_whole))
    return lambda **overrides: mixlab.create_model("caformer_s18", **{**SMALL, "mixers": "test_whole", **overrides})


def test_a_mixer_with_its_own_channel_mixing_has_no_mlp_unless_asked(whole: Callable[..., mixlab.Backbone]) -> None:
    assert not any(isinstance(module, Mlp) for module in whole().modules())
    assert sum(isinstance(module, Mlp) for module in whole(channel_mlp=True).modules()) == 6


def test_a_mixer_may_draw_its_own_weights(whole: Callable[..., mixlab.Backbone]) -> None:
    assert (whole().state_dict()["stages.0.blocks.0.token.branches.0.mixer.linear.weight"] == 7).all()


def test_sequencers_convolutions_start_with_unit_fan_in() -> None:
    weight = mixlab.create_model("sequencer2d_s").state_dict()["stages.1.downsample.conv.weight"]
    assert weight.std().item() * weight[0].numel() ** 0.5 == pytest.approx(1, rel=0.02)


def test_fresh_weights_have_the_papers_spread() -> None:
    weight = mixlab.create_model("convformer_s4").state_dict()["stages.3.blocks.0.channel.branches.0.mixer.fc1.weight"]
    assert weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_a_shared_step_is_called_in_every_block_and_saved_once(
    whole: Callable[..., mixlab.Backbone], tmp_path: Path
) -> None:
    model, image = whole().eval(), torch.randn(1, 3, 64, 64)
    names = [name for name in model.state_dict() if name.endswith("amount")]
    assert names == [f"stages.{index}.shared.amount" for index in range(4)]
    before = model(image)
    mixlab.save_weights(model, tmp_path / "m.safetensors")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.get_parameter("stages.1.shared.amount").add_(1)
    assert not torch.allclose(model(image), before)
    assert torch.equal(twin(image), before)
    assert torch.equal(mixlab.create_model(weights=tmp_path / "m.safetensors").eval()(image), before)
    owner = {name for layer, names in model.layer_order for name in names if layer == "stages.1.blocks.0"}
    assert "stages.1.shared.amount" in owner


def test_two_blocks_both_ways_are_one_layer() -> None:
    model = mixlab.create_model("vil_pico", dims=[16], depths=[5])
    assert [name for name, _ in model.layer_order] == [
        *("stem", "stages.0.blocks.0", "stages.0.blocks.2", "stages.0.blocks.4", "head")
    ]
    names = dict(model.layer_order)["stages.0.blocks.2"]
    assert "stages.0.blocks.3.token.branches.0.mixer.down.weight" in names
    assert "stages.0.position.table" in dict(model.layer_order)["stages.0.blocks.0"]
    assert "stages.0.position.table" in model.no_decay


@pytest.mark.parametrize(
    ("size", "expected"), [((4, 4), [5, 6, 9, 10]), ((3, 3), [4]), ((3, 4), [5, 6]), ((1, 1), [0])]
)
def test_the_centre_is_what_touches_the_middle(size: tuple[int, int], expected: list[int]) -> None:
    grid = Grid(*size, 1)
    tokens = torch.randn(1, grid.tokens, 8)
    pooled = pool(POOLS.parse("centre"), 1)(tokens, grid)
    torch.testing.assert_close(pooled, grid.image(tokens)[:, expected].mean(1))


def test_taps_need_a_single_stage_and_rise() -> None:
    with pytest.raises(ConfigError, match="a single stage for taps"):
        mixlab.create_model("caformer_pico", taps=[4, 12])
    with pytest.raises(ConfigError, match="rising taps from 1 to 12"):
        mixlab.create_model("vil_pico", taps=[12, 4])


def test_vision_lstm_starts_as_its_notes_say() -> None:
    model = mixlab.create_model("vil_pico", num_classes=1000)
    assert model.get_parameter("head.classifier.weight").std().item() == pytest.approx(2e-5, rel=0.05)
    stem = model.get_parameter("stem.conv.weight")
    assert stem.abs().max().item() == pytest.approx((6 / (128 + 48)) ** 0.5, rel=0.02)
