"""Whole models in one call of the kernels: stems, downsampling, class tokens, positions, readouts and heads."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mixlab
from mixlab.core.hooks import without_engine
from mixlab.engine.kernels import has_wide_vectors
from mixlab.engine.lowering import stems
from mixlab.engine.plan import Plan
from mixlab.engine.serve import plan_for
from mixlab.models.backbone import Backbone

pytestmark = pytest.mark.skipif(not has_wide_vectors(), reason="no kernels with vectors of 8 numbers or more")
WHOLE = ("caformer_pico", "convformer_pico", "hb_former_pico", "hpx_former_pico", "sequencer2d_pico", "vil_pico")


def made(name: str, **overrides: Any) -> Backbone:
    """A model in eval mode whose head gives something else than zeros."""
    torch.manual_seed(0)
    model = mixlab.create_model(name, num_classes=7, **overrides).eval()
    for parameter in model.head.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def both_ways(model: Backbone, image: Tensor) -> Plan:
    """Check that the engine gives what the model says, and return the plan that it ran."""
    with torch.inference_mode():
        ours = model(image)
        with without_engine():
            expected = model(image)
        plan = plan_for(model, "forward", image).plan
    assert plan is not None
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    return plan


def reasons(plan: Plan) -> set[str]:
    return {part.reason for part in plan.parts if part.reason}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sides", [(64, 64), (70, 100)])
def test_a_whole_model_is_one_call(name: str, batch: int, sides: tuple[int, int]) -> None:
    model = made(name)
    plan = both_ways(model, torch.randn(batch, 3, *sides))
    assert plan.is_whole
    assert len(plan.items) == 1
    assert not reasons(plan)


def test_images_in_any_order_of_memory() -> None:
    model = made("caformer_pico")
    image = torch.randn(2, 3, 64, 64)
    for other in (image.contiguous(memory_format=torch.channels_last), image.flip(3).flip(3)[:, :, :, :]):
        both_ways(model, other)


@pytest.mark.parametrize("most", [1, 5000])
def test_patches_of_some_rows_at_a_time(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stems, "MOST", most)
    both_ways(made("caformer_pico"), torch.randn(2, 3, 70, 100))


@pytest.mark.parametrize(
    "stem",
    [
        {"name": "patchify", "patch": 8, "norm": "after"},
        {"name": "overlapping", "kernel": 7, "stride": 4, "padding": 2, "norm": "after"},
        {"name": "overlapping", "kernel": 5, "stride": 4, "padding": 0, "norm": "none"},
    ],
    ids=lambda stem: f"{stem['name']}-{stem['norm']}",
)
def test_stems(stem: dict[str, Any]) -> None:
    plan = both_ways(made("caformer_pico", stem=stem), torch.randn(2, 3, 70, 100))
    assert plan.is_whole


@pytest.mark.parametrize("pool", ["mean", {"name": "bilateral", "merge": "concatenate"}, "center"])
@pytest.mark.parametrize("final_norm", ["before_pool", "after_pool"])
def test_readouts(pool: Any, final_norm: str) -> None:
    plan = both_ways(made("caformer_pico", pool=pool, final_norm=final_norm), torch.randn(3, 3, 70, 100))
    assert reasons(plan) == ({"CentrePool is not known to the engine"} if pool == "center" else set())


@pytest.mark.parametrize("merge", ["concatenate", "mean"])
def test_class_tokens(merge: str) -> None:
    tokens = {"class_tokens": [1, 0, 0, 2], "pool": {"name": "class_token", "merge": merge}}
    model = made("caformer_pico", **tokens, mixers=["attention"] * 4)
    plan = both_ways(model, torch.randn(2, 3, 64, 96))
    assert ("class tokens are averaged" in reasons(plan)) == (merge == "mean")


def test_what_another_stem_does_is_left_to_it() -> None:
    model = made("caformer_pico")
    model.stem.conv.padding_mode = "reflect"  # type: ignore[union-attr]
    model.stem.conv._reversed_padding_repeated_twice = [2, 2, 2, 2]  # type: ignore[union-attr]
    plan = both_ways(model, torch.randn(1, 3, 64, 64))
    assert "a convolution is not a usual one" in reasons(plan)


@pytest.mark.parametrize(
    "options", [{"bidirectional": False}, {"axes": "vertical"}, {"merge": "add"}, {"cell": "gru"}, {"fusion": False}]
)
def test_recurrent_layers(options: dict[str, Any]) -> None:
    options = {**options, **({"hidden_ratio": 0.5} if options.get("merge") == "add" else {})}
    served = "merge" not in options and "cell" not in options and "fusion" not in options
    model = made("sequencer2d_pico", mixers=[{"name": "rnn2d", **options}] * 4)
    plan = both_ways(model, torch.randn(2, 3, 64, 96))
    assert plan.is_whole == served
