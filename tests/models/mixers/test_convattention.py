from typing import Any

import pytest
import torch
from torch import nn

import mixlab
from mixlab.core.errors import ConfigError
from mixlab.core.grid import Grid
from mixlab.engine import kernels as library
from mixlab.models.mixers import MIXERS
from mixlab.models.mixers.convattention import heads_up_to, split_heads
from tests.models.mixers.contract import MixerContract


class TestConvAttention(MixerContract):
    name = "convattention"
    spatial = False

    def test_it_is_equation_12(self) -> None:
        held, grid = self.held(), Grid(3, 4, prefix=1)
        tokens = torch.randn(2, grid.tokens, self.dim)
        query, key, value = held.mixer.qkv(tokens).chunk(3, -1)  # type: ignore[operator]
        heads = []
        convs = held.get_submodule("shared.relative_position.convs")
        windows = [conv for conv, count in zip(convs.children(), (2, 3, 3), strict=True) for _ in range(count)]
        seen = [0, 0, 0]
        for head in range(8):
            part = slice(4 * head, 4 * head + 4)
            context = key[..., part].softmax(1).transpose(1, 2) @ value[..., part]
            conv = windows[head]
            assert isinstance(conv, nn.Conv2d)
            which = [conv is other for other in convs.children()].index(True)
            start = 4 * seen[which]
            seen[which] += 1
            image = value[:, 1:, part].transpose(1, 2).unflatten(2, (3, 4))
            kernel = conv.weight[start : start + 4]
            near = nn.functional.conv2d(image, kernel, None, padding=conv.padding, groups=4).flatten(2).transpose(1, 2)
            relative = nn.functional.pad(query[:, 1:, part] * near, (0, 0, 1, 0))
            heads.append(query[..., part] @ context * 4**-0.5 + relative)
        expected = held.mixer.project(torch.cat(heads, -1))  # type: ignore[operator]
        torch.testing.assert_close(held(tokens, grid), expected)


class TestConvAttentionWithBias(MixerContract):
    name = "convattention"
    spatial = False
    options = {"bias": True}


class TestBareFactorisedAttention(MixerContract):
    name = "convattention"
    spatial = False
    options = {"position": False, "relative_position": False, "scaled": False, "softmax_query": True, "bias": False}

    def test_nothing_is_shared(self) -> None:
        assert self.held().shared is None


class TestOddWidth(MixerContract):
    name = "convattention"
    spatial = False
    dim = 35


def test_blocks_of_a_stage_share_their_encodings() -> None:
    choice = MIXERS.parse("convattention")
    parts = MIXERS.builder(choice)(choice.options, 32, 3, Grid(4, 4))
    assert parts.shared is not None
    names = {name.split(".")[0] for name in parts.shared.state_dict()}
    assert names == {"position", "relative_position"}
    assert not any("conv" in name for block in parts.blocks for name in block.branches[0].state_dict())


@pytest.mark.parametrize(("dim", "heads"), [(64, 8), (35, 7), (36, 6), (11, 1)])
def test_heads_divide_the_channels(dim: int, heads: int) -> None:
    assert heads_up_to(dim, 8) == heads


@pytest.mark.parametrize(("heads", "split"), [(8, [2, 3, 3]), (7, [2, 2, 3]), (1, [0, 1, 0]), (16, [4, 6, 6])])
def test_windows_get_their_share_of_the_heads(heads: int, split: list[int]) -> None:
    assert split_heads(heads, (2, 3, 3)) == split


@pytest.mark.parametrize(
    ("options", "message"),
    [({"heads": 0}, "heads must be"), ({"windows": [3]}, "one entry each"), ({"windows": [2, 3, 5]}, "odd")],
)
def test_impossible_options_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MIXERS.parse({"name": "convattention", **options})


@pytest.mark.parametrize("softmax_query", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_the_explained_factors_are_the_attention(scaled: bool, softmax_query: bool) -> None:
    """Their product over the values is what the mixer mixes, but for the encoding of relative positions."""
    choice = MIXERS.parse(
        {"name": "convattention", "relative_position": False, "scaled": scaled, "softmax_query": softmax_query}
    )
    mixer: Any = MIXERS.builder(choice)(choice.options, 32, 1, Grid(4, 4)).blocks[0].branches[0]
    grid = Grid(3, 4, prefix=1)
    tokens = torch.randn(2, grid.tokens, 32)
    shown = mixer.explain(tokens, grid)
    value = mixer.split(tokens)[2].unflatten(2, (8, 4)).transpose(1, 2)
    mixed = (shown["query_factor"] @ shown["key_factor"].mT) @ value
    torch.testing.assert_close(mixer.project(mixed.transpose(1, 2).flatten(2)), mixer(tokens, grid))


def test_what_inference_does_in_one_convolution_equals_what_training_does_in_several() -> None:
    model = mixlab.create_model("coat_lite_pico").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "position" in name:
                parameter.normal_(std=0.3)
        image = torch.randn(2, 3, 72, 104)
        inference = model(image)
    torch.testing.assert_close(inference, model(image), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["coat_lite_pico", "coat_tiny"])
def test_training_by_kernels_gives_the_gradients_of_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, image = mixlab.create_model(name, num_classes=5), torch.randn(2, 3, 72, 104)

    def gradients() -> list[torch.Tensor]:
        return list(torch.autograd.grad(model(image).square().sum(), list(model.parameters()), allow_unused=True))

    ours = gradients()
    monkeypatch.setattr(library, "kernels", lambda: None)
    for found, one in zip(ours, gradients(), strict=True):
        assert (found is None) == (one is None)
        if one is not None:
            assert float((found - one).abs().max()) <= 1e-4 * float(one.abs().max()) + 1e-6


@pytest.mark.parametrize("which", ["position.conv", "relative_position", "relative_position.convs.1"])
def test_hooks_hear_what_is_called_in_training(which: str) -> None:
    model = mixlab.create_model("coat_lite_pico", num_classes=5)
    heard: list[int] = []
    model.get_submodule(f"stages.0.shared.{which}").register_forward_hook(lambda *_: heard.append(1))
    model(torch.randn(1, 3, 64, 64)).sum().backward()
    assert len(heard) == len(model.stages[0].blocks)
