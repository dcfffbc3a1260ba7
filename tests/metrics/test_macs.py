import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mixlab
from mixlab.core.errors import ConfigError, MacsError
from mixlab.evals.cost.summary import stored_counts, summarize
from mixlab.metrics.macs import macs_by_part
from mixlab.models.config import Reported
from mixlab.models.zoo import ensemble_row, model_config

ROWS = [
    pytest.param(name, row, id=f"{name}@{row.image_size}")
    for name in mixlab.list_models()
    for row in (ensemble_row(name) or model_config(name)).reported
    if row.macs is not None and row.pretraining is None
]
# GMACs of the authors' code under their own counting
AUTHORS = {
    ("convformer_s18", 224): 3.956,
    ("convformer_s18", 384): 11.621,
    ("caformer_s18", 224): 4.122,
    ("caformer_s18", 384): 13.412,
    ("coat_lite_tiny", 224): 1.598,
    ("coat_lite_mini", 224): 1.997,
    ("coat_lite_small", 224): 3.96,
    ("coat_tiny", 224): 4.35,
    ("coat_mini", 224): 6.815,
    ("hpx_former_s18", 224): 4.921,
    ("hpx_former_s18", 384): 12.869,
    ("hpx_former_s18", 512): 22.269,
    ("c_hpx_former_s18", 224): 4.327,
    ("hpx_a_former_s18", 224): 4.701,
    ("hpx_former_b36", 224): 25.339,
}


@functools.cache
def counted(name: str, size: int) -> int:
    """At a model's own size what is stored, which `test_summary` counts again."""
    if summarize(name).image_size == (size, size):
        return stored_counts()[name]["macs"]
    with torch.device("meta"):
        model = mixlab.create_model(name)
    return mixlab.macs(model, size)


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_counts_are_the_papers(name: str, row: Reported) -> None:
    ours = counted(name, row.image_size) / 1e9
    assert row.macs is not None
    assert abs(ours - row.macs) <= 0.05 or abs(ours / row.macs - 1) <= 0.03


@pytest.mark.parametrize(("name", "size"), sorted(AUTHORS))
def test_counts_are_the_authors_to_an_eighth_of_a_percent(name: str, size: int) -> None:
    assert counted(name, size) / 1e9 == pytest.approx(AUTHORS[name, size], rel=1.25e-3)


def test_one_block_counts_by_formula() -> None:
    model = mixlab.create_model("identityformer_s_iso", depths=[1], num_classes=10)
    tokens, dim = 196, 384
    mlp, norms = 2 * 4 * dim * dim * tokens, 2 * 4 * tokens * dim
    parts = macs_by_part(model, 224)
    assert parts["stem"] == 16 * 16 * 3 * dim * tokens
    assert parts["stages.0"] == mlp + norms
    assert parts["head"] == dim * 10 + 4 * dim


def test_attention_counts_both_products() -> None:
    whole = mixlab.create_model("identityformer_s_iso", depths=[1], mixers="attention")
    without = mixlab.create_model("identityformer_s_iso", depths=[1])
    tokens, dim = 196, 384
    expected = 4 * dim * dim * tokens + 2 * tokens * tokens * dim
    assert mixlab.macs(whole, 224) - mixlab.macs(without, 224) == expected


def test_window_attention_costs_less_than_attention_on_large_images() -> None:
    whole = mixlab.create_model("caformer_pico")
    window = mixlab.create_model("caformer_pico", mixers=["sepconv", "sepconv", "window_attention", "window_attention"])
    assert mixlab.macs(window, 1024) < 0.5 * mixlab.macs(whole, 1024)


def test_window_attention_counts_the_keys_that_a_query_sees() -> None:
    """Not those of the tiles that the implementation cuts: a window of 5 x 5 at every token of a grid of 16 x 12."""
    options: dict[str, Any] = {"depths": [1], "class_tokens": 1, "pool": "class_token"}
    window = mixlab.create_model("identityformer_s_iso", **options, mixers={"name": "window_attention", "window": 5})
    whole = mixlab.create_model("identityformer_s_iso", **options, mixers="attention")
    tokens, dim, size = 16 * 12, 384, (256, 192)
    without_pairs = mixlab.macs(whole, size) - 2 * (tokens + 1) ** 2 * dim
    pairs = tokens * (5 * 5 + 1) + tokens + 1  # the class token is seen by all and sees all
    assert mixlab.macs(window, size) - without_pairs == 2 * pairs * dim


def test_a_window_larger_than_the_grid_counts_as_attention() -> None:
    whole = mixlab.create_model("caformer_pico")
    window = mixlab.create_model("caformer_pico", mixers=["sepconv", "sepconv", "window_attention", "window_attention"])
    assert mixlab.macs(window, 64) == mixlab.macs(whole, 64)


def test_counting_leaves_the_model_alone() -> None:
    model = mixlab.create_model("caformer_pico").train()
    before = [parameter.device for parameter in model.parameters()]
    mixlab.macs(model, (64, 96))
    assert model.training
    assert [parameter.device for parameter in model.parameters()] == before


class Strange(nn.Module):
    def forward(self, tokens: Tensor, grid: object) -> Tensor:
        return torch.linalg.qr(tokens)[0]


def test_an_unknown_operator_is_an_error() -> None:
    model = mixlab.create_model("caformer_pico")
    model.stages[0].blocks[0].token.branches[0].mixer = Strange()
    with pytest.raises(MacsError, match=r"linalg_qr.*not guessed"):
        mixlab.macs(model, 64)


@pytest.mark.parametrize("size", [0, "224", 224.0, (64,), None])
def test_an_impossible_size_is_an_error(size: Any) -> None:
    with pytest.raises(ConfigError, match="in whole pixels"):
        mixlab.macs(mixlab.create_model("caformer_pico"), size)


def test_precision_and_hooks_of_the_model_do_not_matter() -> None:
    model = mixlab.create_model("caformer_pico")
    expected = mixlab.macs(model, 64)
    model.stem.register_forward_hook(lambda *_: pytest.fail("called"))
    assert mixlab.macs(model.bfloat16(), 64) == expected
    assert mixlab.macs(mixlab.PyramidAdapter(model), 64) > 0.9 * expected
    with pytest.raises(ConfigError, match="got a Linear"):
        mixlab.macs(nn.Linear(1, 1), 64)


def test_a_recurrent_layer_counts_by_formula() -> None:
    """An LSTM costs 4 D (C + D) per token and direction, a GRU 3, a tanh-RNN 1 time D (C + D)."""
    tokens, dim, hidden = 196, 384, 96
    without = mixlab.create_model("identityformer_s_iso", depths=[1])
    for cell, gates in (("lstm", 4), ("gru", 3), ("rnn", 1)):
        model = mixlab.create_model("identityformer_s_iso", depths=[1], mixers={"name": "rnn2d", "cell": cell})
        fusion = dim * dim * tokens
        expected = 4 * tokens * gates * hidden * (dim + hidden) + fusion
        assert mixlab.macs(model, 224) - mixlab.macs(without, 224) == expected


@pytest.mark.parametrize(
    ("name", "authors"), [("hb_former_s18", 4.444), ("hb_a_former_s18", 4.431), ("hb_former_b36", 23.813)]
)
def test_sequences_through_the_fourier_transform_count_as_the_authors_to_half_a_percent(
    name: str, authors: float
) -> None:
    assert counted(name, 224) / 1e9 == pytest.approx(authors, rel=5e-3)


def test_kept_filters_and_forms_do_not_change_the_count() -> None:
    model = mixlab.create_model("hpx_former_pico").eval()
    before = mixlab.macs(model, 32)
    with torch.no_grad():
        model(torch.randn(1, 3, 32, 32))
    assert mixlab.macs(model, 32) == before
    forced = mixlab.create_model("hpx_former_pico", mixers={"name": "hyena_pixel", "bands": 8, "form": "direct"})
    assert mixlab.macs(forced, 32) == before
