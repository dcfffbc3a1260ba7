from typing import Any

import pytest
import torch
from torch import nn

import mixlab
from mixlab.core.errors import ConfigError
from mixlab.engine.cache import CACHE
from mixlab.evals.inspect.truncation import inside, stages_with_kernels, truncated, truncation_curves
from mixlab.evals.subjects import open_subject
from mixlab.models.implicit_filter import ImplicitFilter
from mixlab.models.mixers.hyena import LongConv, SeparableConv

IMAGE = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(1))
KERNEL_MODELS: dict[str, dict[str, Any]] = {
    "plane": {"mixers": "hyena_pixel"},
    "both ways": {"mixers": "hyena_bidirectional"},
    "causal": {"mixers": "hyena"},
    "separable": {"mixers": {"name": "hyena_pixel", "filter": "separable", "kernel": 7}},
    "depthwise": {"mixers": "sepconv"},
}


def model_with(kind: str) -> mixlab.Backbone:
    model = mixlab.create_model("caformer_pico", num_classes=5, **KERNEL_MODELS[kind]).eval()
    for parameter in model.parameters():  # so that the kernels matter
        nn.init.normal_(parameter, std=0.2) if parameter.requires_grad and parameter.ndim > 1 else None
    return model


def without_filter(model: mixlab.Backbone) -> mixlab.Backbone:
    """The same model with kernels of zero and nothing else changed."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, ImplicitFilter):
                module.out.weight.zero_()
            elif isinstance(module, SeparableConv):
                module.down.weight.zero_()
        for mixers in model.token_mixers.values():
            for mixer in mixers:
                for part in mixer.kernel_sources():
                    if isinstance(part, nn.Conv2d):
                        part.weight.zero_()
    return model


@pytest.mark.parametrize("kind", KERNEL_MODELS)
def test_truncating_nothing_changes_nothing(kind: str) -> None:
    model = model_with(kind)
    with torch.no_grad():
        before = model(IMAGE)
        with truncated(model, 1.0):  # the branch goes layer by layer then, which rounds in another order
            torch.testing.assert_close(model(IMAGE), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KERNEL_MODELS)
def test_truncating_everything_is_a_model_without_the_filter(kind: str) -> None:
    model = model_with(kind)
    with torch.no_grad():
        before = model(IMAGE)
        with truncated(model, 0.0):
            cut = model(IMAGE)
        assert not torch.allclose(cut, before)
        torch.testing.assert_close(cut, without_filter(model)(IMAGE))


@pytest.mark.parametrize("kind", KERNEL_MODELS)
def test_the_model_is_as_it_was_afterwards(kind: str) -> None:
    """Also what eval mode keeps: a kept kernel is not used inside, a cut one is not kept, and the kept one is left."""
    model = model_with(kind)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    convs = [module for module in model.modules() if isinstance(module, LongConv)]
    with torch.no_grad():
        before = model(IMAGE)
        entries = [CACHE.entries(conv) for conv in convs]
        assert all(entries)
        with truncated(model, 0.3):
            cut = model(IMAGE)
        assert not torch.allclose(cut, before)
        assert [CACHE.entries(conv) for conv in convs] == entries
        assert torch.equal(model(IMAGE), before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_that_was_never_run_keeps_no_cut_kernel() -> None:
    model, twin = model_with("plane"), model_with("plane")
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        with truncated(model, 0.0):
            model(IMAGE)
        torch.testing.assert_close(model(IMAGE), twin(IMAGE))


def test_the_model_is_restored_after_an_error() -> None:
    model = model_with("plane")
    with pytest.raises(RuntimeError, match="on purpose"), truncated(model, 0.5):
        raise RuntimeError("on purpose")
    assert not any(module._forward_hooks for module in model.modules())


def test_a_cut_kernel_is_zero_outside_and_itself_inside() -> None:
    model = model_with("plane")
    whole = model.explain(IMAGE, "stages.0.blocks.0")["kernels"]  # 31 x 31
    with truncated(model, 0.3, stages=[0]):
        cut = model.explain(IMAGE, "stages.0.blocks.0")["kernels"]
        other = model.explain(IMAGE, "stages.1.blocks.0")["kernels"]
    assert torch.equal(cut[:, 11:20, 11:20], whole[:, 11:20, 11:20])
    assert cut[:, 11:20, 11:20].count_nonzero() == cut.count_nonzero()
    assert torch.equal(other, model.explain(IMAGE, "stages.1.blocks.0")["kernels"])


@pytest.mark.parametrize(("share", "kept"), [(0.0, 0), (0.01, 1), (1 / 9, 1), (0.34, 3), (0.5, 5), (0.99, 9), (1.0, 9)])
def test_shares_of_nine_taps(share: float, kept: int) -> None:
    taps = inside((9,), share, causal=False)
    assert int(taps.sum()) == kept
    assert torch.equal(taps, taps.flip(0))


def test_a_causal_kernel_loses_what_is_long_ago() -> None:
    assert inside((8,), 0.5, causal=True).tolist() == [True] * 4 + [False] * 4


def test_curves_start_without_and_end_with_the_kernels() -> None:
    subject = open_subject("hpx_former_pico", num_classes=10, seed=3)
    found, figures = truncation_curves(
        subject, "digits", shares=[0, 0.5, 1], stages=[0, 3], images=40, batch=16, workers=0, device="cpu"
    )
    assert [(row[0], row[1]) for row in found.table] == [(f"stage {s}", x) for s in (0, 3) for x in (0, 0.5, 1)]
    assert found.settings["images"] == 40
    for row in found.table:
        if row[1] == 1:
            assert (row[4], row[5]) == (found.settings["top1"], 0)
    assert found.table[0][2:4] == ("0x0", 0)
    assert found.table[2][2] == "31x31"
    assert list(figures) == ["truncate"]


def test_stages_without_kernels_are_errors() -> None:
    model = mixlab.create_model("caformer_pico")
    assert stages_with_kernels(model) == [0, 1]
    with (
        pytest.raises(ConfigError, match=r"Stage 2 of 'caformer_pico' has no kernels.*\[0, 1\]"),
        truncated(model, 0.5, stages=[2]),
    ):
        pass
    with pytest.raises(ConfigError, match=r"between 0 and 1; got 1\.5"), truncated(model, 1.5):
        pass
