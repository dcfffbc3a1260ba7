from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mixlab
from mixlab.core.errors import ConfigError
from mixlab.core.grid import Grid
from mixlab.evals.inspect.maps import attention_maps, directions, feature_maps, gate_maps, query_rows
from mixlab.evals.subjects import open_subject

IMAGE = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(2))
COAT: dict[str, Any] = {"dims": [16, 24, 24, 24], "depths": [1, 1, 1, 1], "num_classes": 5, "image_size": 32}


def drawn(model: mixlab.Backbone) -> mixlab.Backbone:
    """Weights that are far from the start values, so that nothing is flat."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


# -- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("query", [None, (0.0, 0.9)])
def test_rows_of_attention_add_up_to_one(query: tuple[float, float] | None) -> None:
    model = drawn(mixlab.create_model("caformer_pico", mixers=["window_attention", "random", "attention", "attention"]))
    found = attention_maps(model, IMAGE, query=query)
    assert set(found) == set(model.blocks)
    for name, maps in found.items():
        grid = model.grids(32, 48)[int(name.split(".")[1])]
        assert maps.shape[0] == 2
        assert maps.shape[2:] == (grid.height, grid.width)
        torch.testing.assert_close(maps.sum((2, 3)), torch.ones(maps.shape[:2]))


def test_the_class_token_asks_where_there_is_one() -> None:
    model = drawn(mixlab.create_model("deit_tiny", dims=[24], depths=[2], image_size=32, num_classes=5))
    name = "stages.0.blocks.1"
    whole = model.explain(IMAGE, name)["attention"]  # (B, heads, 1 + 2 * 3, 1 + 2 * 3)
    maps = attention_maps(model, IMAGE, blocks=[name])[name]
    torch.testing.assert_close(maps.flatten(2), whole[:, :, 0, 1:])
    torch.testing.assert_close(maps.sum((2, 3)) + whole[:, :, 0, 0], torch.ones(2, whole.shape[1]))
    other = attention_maps(model, IMAGE, blocks=[name], query=(0.9, 0.1))[name]  # second row, first column
    torch.testing.assert_close(other.flatten(2), whole[:, :, 1 + 3, 1:])


def test_the_centre_asks_where_there_is_no_class_token() -> None:
    assert query_rows(Grid(5, 7), None) == slice(2 * 7 + 3, 2 * 7 + 4)
    assert query_rows(Grid(5, 7, 2), None) == slice(0, 2)
    assert query_rows(Grid(5, 7, 2), (1.0, 1.0)) == slice(36, 37)


@pytest.mark.parametrize("place", ["stages.2.blocks.0", "coscale.blocks.1.2"])
def test_class_attention_of_coat_is_the_factorised_form_by_brute_force(place: str) -> None:
    """For every head: the class token's query times the softmax over tokens of every key channel, term by term."""
    model = drawn(mixlab.create_model("coat_tiny", **{**COAT, "coscale": {"blocks": 2}}))
    (mixer,), seen = model.token_mixers[place], []
    handle = mixer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs))
    model(IMAGE)
    handle.remove()
    tokens, grid = seen[0]
    query, key, _ = F.linear(tokens, mixer.qkv.weight, mixer.qkv.bias).chunk(3, -1)  # type: ignore[union-attr,arg-type]
    expected = torch.zeros(2, 8, grid.image_tokens)
    for head in range(8):
        for channel in range(3 * head, 3 * head + 3):
            weights = key[:, :, channel].exp() / key[:, :, channel].exp().sum(1, keepdim=True)  # over the tokens
            expected[:, head] += query[:, :1, channel] * weights[:, 1:] * 3**-0.5
    maps = attention_maps(model, IMAGE, blocks=[place])[place]
    assert maps.shape == (2, 8, grid.height, grid.width)
    torch.testing.assert_close(maps.flatten(2), expected, atol=1e-5, rtol=1e-4)


def test_the_map_times_the_values_is_what_the_class_token_gets() -> None:
    """It has no relative position term, so the factorised form is all of its attention."""
    model = drawn(mixlab.create_model("coat_lite_pico", num_classes=5))
    place = "stages.1.blocks.0"
    (mixer,), seen = model.token_mixers[place], []
    handle = mixer.register_forward_hook(lambda module, inputs, output: seen.append((*inputs, output)))
    model(IMAGE)
    handle.remove()
    tokens, grid, output = seen[0]
    shown = mixer.explain(tokens, grid)
    attention = (shown["query_factor"][:, :, :1] @ shown["key_factor"].mT)[:, :, 0]  # (B, heads, N)
    value = mixer.split(tokens)[2].unflatten(2, (attention.shape[1], -1))  # type: ignore[operator]
    mixed = torch.einsum("bhn,bnhd->bhd", attention, value).flatten(1)
    torch.testing.assert_close(mixer.project(mixed), output[:, 0], atol=1e-4, rtol=1e-4)  # type: ignore[operator]
    maps = attention_maps(model, IMAGE, blocks=[place])[place]
    torch.testing.assert_close(maps.flatten(2), attention[..., 1:])


# -- gates ---------------------------------------------------------------------------------------


def test_gates_and_decay_lie_between_zero_and_one() -> None:
    model = drawn(mixlab.create_model("vil_pico"))
    found = gate_maps(model, IMAGE)
    assert set(found) == set(model.blocks)
    for words in found.values():
        assert list(words) == ["input_gate", "forget_gate", "decay"]
        for maps in words.values():
            assert maps.shape[2:] == tuple(model.grids(32, 48)[0][:2])
            assert ((maps >= 0) & (maps <= 1)).all()
            assert maps.std() > 0


def test_every_other_block_walks_backwards() -> None:
    model = drawn(mixlab.create_model("vil_pico"))
    ways = directions(model)
    for index, (name, words) in enumerate(gate_maps(model, IMAGE).items()):
        decay = words["decay"].flatten(2)  # what was written last is kept best
        steps = decay.diff(dim=-1)
        assert ways[name] == ("rows from bottom right" if index % 2 else "rows from top left")
        assert (steps <= 0).all() if index % 2 else (steps >= 0).all()
        last = decay[..., 0] if index % 2 else decay[..., -1]
        torch.testing.assert_close(last, torch.ones_like(last))


def test_parallel_branches_are_told_apart() -> None:
    model = drawn(mixlab.create_model("vil_pico", mixers={"name": "mlstm", "concurrency": "parallel"}, depths=[2]))
    found = gate_maps(model, IMAGE, blocks=["stages.0.blocks.1"])
    assert list(found) == ["stages.0.blocks.1 (0)", "stages.0.blocks.1 (1)"] == list(directions(model))[2:]
    first, second = (words["decay"].flatten(2).diff(dim=-1) for words in found.values())
    assert (first >= 0).all()
    assert (second <= 0).all()


# -- features and errors -------------------------------------------------------------------------


def test_features_are_the_named_intermediate() -> None:
    subject = open_subject("caformer_pico")
    found = feature_maps(subject, IMAGE, "stages.1")
    assert isinstance(subject.model, mixlab.Backbone)
    torch.testing.assert_close(found, subject.model.intermediates(IMAGE, ["stages.1"])["stages.1"])
    with pytest.raises(ConfigError, match=r"no intermediate 'stages\.11'.*Did you mean"):
        feature_maps(subject, IMAGE, "stages.11")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: attention_maps(mixlab.create_model("convformer_pico"), IMAGE),
            "to show: its mixers are sepconv",
        ),
        (lambda: gate_maps(mixlab.create_model("caformer_pico"), IMAGE), "No block of 'caformer_pico' has gates"),
        (
            lambda: attention_maps(mixlab.create_model("caformer_pico"), IMAGE, blocks=["stages.0.blocks.0"]),
            r"no attention at 'stages\.0\.blocks\.0'. Did you mean",
        ),
        (lambda: attention_maps(mixlab.create_model("caformer_pico"), IMAGE, query=(0.5, 2)), "between 0 and 1"),
        (lambda: attention_maps(open_subject("timm:resnet18"), IMAGE), "only Mixlab's own models"),
    ],
)
def test_what_cannot_be_shown_is_explained(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
