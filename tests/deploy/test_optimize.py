import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import mixlab
from mixlab.cli import main
from mixlab.core.compat import has_onednn_products
from mixlab.core.errors import CompileError, ConfigError, ImageError
from mixlab.deploy import optimize as optimise
from mixlab.deploy.export import open_export
from mixlab.deploy.folding import fold, keep_packed, pack
from mixlab.deploy.optimize import Optimized, optimize
from mixlab.engine.compile import has_compiler
from mixlab.engine.kernels import has_wide_vectors
from mixlab.engine.serve import is_frozen, thaw
from mixlab.models.layers import Residual, Scaling, SquaredReLU, StarReLU
from mixlab.ops.layers import PackedLinear

PICOS = mixlab.list_models("*_pico")


def trained(name: str, **options: Any) -> mixlab.Backbone:
    """A model none of whose parameters has the value that it starts with."""
    torch.manual_seed(0)
    model = mixlab.create_model(name, num_classes=7, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def scores(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(images)
    return found


@pytest.mark.parametrize("name", PICOS)
def test_the_optimised_model_computes_the_same_at_any_size(name: str) -> None:
    model, images = trained(name), torch.randn(2, 3, 64, 96)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    fast = optimize(model, images, compile=False)
    for other in (images, torch.randn(1, 3, 50, 70)):
        torch.testing.assert_close(fast(other), scores(model, other), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert fast.report is not None
    assert (fast.report.batch, fast.report.image_size) == (2, (64, 96))
    assert set(fast.report.milliseconds) == {"original", "eager", "packed"}
    assert fast.report.gain == pytest.approx(
        fast.report.milliseconds["original"] / fast.report.milliseconds[fast.report.chosen]
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("convformer_pico", {}),
        ("caformer_pico", {"branch_scale": "branch_scale"}),
        ("vil_pico", {"branch_scale": {"name": "layer_scale", "branch": 0.1}}),
        ("sequencer2d_pico", {"branch_scale": "branch_scale"}),
    ],
)
def test_folding_is_exact_but_for_rounding(name: str, options: dict[str, Any]) -> None:
    model, images = trained(name, **options).double(), torch.randn(2, 3, 64, 64).double()
    folded = copy.deepcopy(model)
    said = fold(folded)
    assert said
    torch.testing.assert_close(scores(folded, images), scores(model, images), rtol=1e-10, atol=1e-10)
    branches = [m.scaling.branch for m in folded.modules() if isinstance(m, Residual)]
    assert branches
    assert all(branch is None for branch in branches)


class TanhScale(Scaling):
    """A branch scaling of a user's own: tokens + tanh(branch) * update."""

    def forward(self, tokens: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        assert self.branch is not None
        return tokens + update * self.branch.tanh()


def test_a_branch_scaling_of_another_kind_is_not_folded() -> None:
    model, images = trained("convformer_pico"), torch.randn(2, 3, 64, 64)
    for module in model.modules():
        if isinstance(module, Residual):
            norm = module.branches[0].norm
            assert isinstance(norm, nn.LayerNorm)
            module.scaling = TanhScale(len(norm.weight), branch=0.9).eval()
    expected = scores(model, images)
    fold(model)
    torch.testing.assert_close(scores(model, images), expected, rtol=1e-4, atol=1e-5)


def test_star_relus_in_front_of_a_linear_layer_are_gone() -> None:
    model = trained("convformer_pico")
    before = sum(isinstance(module, StarReLU) for module in model.modules())
    fold(model)
    left = sum(isinstance(module, StarReLU) for module in model.modules())
    squared = sum(isinstance(module, SquaredReLU) for module in model.modules())
    assert 0 < left < before <= left + squared  # those in front of a convolution stay


@pytest.mark.skipif(not has_onednn_products(), reason="this PyTorch has no oneDNN")
def test_packed_layers_are_constants() -> None:
    model = trained("caformer_pico")
    count = pack(model)
    assert count == sum(isinstance(module, PackedLinear) for module in model.modules()) > 0
    assert not any(name.endswith("fc1.weight") for name, _ in model.named_parameters())


@pytest.mark.skipif(not has_wide_vectors(), reason="branches are kernels in one call with vectors of 8 or more")
@pytest.mark.parametrize("name", ["convformer_pico", "vil_pico", "coat_lite_pico"])
def test_branches_keep_packed_weights(name: str) -> None:
    model, images = trained(name), torch.randn(2, 3, 64, 64)
    expected = scores(model, images)
    assert keep_packed(model, images) > 0
    for size in (64, 96, 64):  # other numbers of rows share what is packed
        scores(model, torch.randn(1, 3, size, size))
    torch.testing.assert_close(scores(model, images), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    twin = copy.deepcopy(model)
    assert not is_frozen(twin)
    torch.testing.assert_close(scores(twin, images), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.skipif(not has_wide_vectors(), reason="branches are kernels in one call with vectors of 8 or more")
def test_packed_weights_are_those_of_then_until_the_model_is_thawed() -> None:
    model, images = trained("vil_pico"), torch.randn(2, 3, 64, 64)
    before = scores(model, images)
    assert keep_packed(model, images) > 0
    model.load_state_dict({name: value * 1.1 for name, value in model.state_dict().items()})
    thaw(model)
    fresh = trained("vil_pico")
    fresh.load_state_dict(model.state_dict())
    expected = scores(fresh, images)
    assert not torch.allclose(expected, before, rtol=1e-3)
    torch.testing.assert_close(scores(model, images), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.skipif(not has_wide_vectors(), reason="branches are kernels in one call with vectors of 8 or more")
def test_nothing_is_packed_where_kernels_have_no_part() -> None:
    assert keep_packed(trained("convformer_pico").double(), torch.randn(1, 3, 64, 64).double()) == 0


@pytest.mark.parametrize("part", ["fc1", "act", "fc2"])
def test_parts_with_hooks_keep_them(part: str) -> None:
    model, seen = trained("caformer_pico"), []
    hooked = model.get_submodule(f"stages.0.blocks.0.channel.branches.0.mixer.{part}")
    hooked.register_forward_hook(lambda *_: seen.append(1))
    fold(model)
    pack(model)
    scores(model, torch.randn(1, 3, 64, 64))
    assert seen == [1]


def test_it_can_be_copied_but_neither_trained_nor_saved() -> None:
    fast, images = optimize(trained("vil_pico"), torch.randn(1, 3, 64, 64), compile=False), torch.randn(2, 3, 64, 64)
    twin = copy.deepcopy(fast)
    assert twin is not fast
    assert torch.equal(twin(images), fast(images))
    assert fast.embed(images).shape[0] == 2
    assert fast.config.name == "vil_pico"
    with torch.autocast("cpu", torch.float16):
        assert fast(images).dtype is torch.float32
    refused = [fast.train, fast.state_dict, fast.double, lambda: fast.load_state_dict({}), lambda: pickle.dumps(fast)]
    for action in refused:
        with pytest.raises(ConfigError, match="with the original"):
            action()


def test_a_form_that_computes_something_else_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(model: nn.Module) -> list[str]:
        said = fold(model)
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
        return said

    monkeypatch.setattr(optimise, "fold", spoil)
    model, images = trained("convformer_pico"), torch.randn(1, 3, 64, 64)
    fast = optimize(model, images, compile=False)
    assert fast.report is not None
    assert (fast.report.chosen, fast.report.gain, fast.report.difference) == ("original", 1.0, 0.0)
    assert "not taken" in fast.report.steps[-1]
    torch.testing.assert_close(fast(images), scores(model, images), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not has_onednn_products(), reason="this PyTorch has no oneDNN")
def test_packed_weights_serve_whatever_follows_the_arithmetic() -> None:
    model, images = trained("caformer_pico"), torch.randn(2, 3, 64, 64)
    pack(model)
    fast, expected = Optimized(model), scores(trained("caformer_pico"), images)
    assert fast(images[:0]).shape == (0, 7)
    with torch.backends.mkldnn.flags(enabled=False):
        torch.testing.assert_close(fast(images), expected, rtol=1e-4, atol=1e-4)
    with FlopCounterMode(display=False):
        torch.testing.assert_close(fast(images), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.compile(fast, backend="eager")(images), expected, rtol=1e-4, atol=1e-4)


def test_scales_behind_an_exchange_of_scales_stay() -> None:
    model, images = trained("coat_tiny", branch_scale="branch_scale"), torch.randn(1, 3, 64, 64)
    folded = copy.deepcopy(model)
    fold(folded)
    torch.testing.assert_close(scores(folded, images), scores(model, images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_floats_are_optimised_too(dtype: torch.dtype) -> None:
    model, images = trained("convformer_pico").to(dtype), torch.randn(1, 3, 64, 64).to(dtype)
    fast = optimize(model, images, compile=False)
    torch.testing.assert_close(fast(images), scores(model, images), rtol=1e-2, atol=1e-2)


def test_bad_input_is_an_error_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = trained("convformer_pico"), torch.randn(1, 3, 64, 64)
    monkeypatch.setattr(optimise, "fold", lambda model: pytest.fail("it began to work"))
    with pytest.raises(ImageError):
        optimize(model, images[0])
    with pytest.raises(ConfigError, match="takes a Mixlab model"):
        optimize(nn.Linear(2, 2), images)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="bound"):
        optimize(model, images, bound=2.0)
    with pytest.raises(ConfigError, match="one image or more"):
        optimize(model, images[:0])
    monkeypatch.setattr(optimise, "has_compiler", lambda: False)
    with pytest.raises(CompileError, match="C\\+\\+ compiler"):
        optimize(model, images, compile=True)


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
def test_compiled_blocks_take_part() -> None:
    model, images = trained("convformer_pico"), torch.randn(1, 3, 64, 64)
    fast = optimize(model, images, compile=True)
    assert isinstance(fast, Optimized)
    assert fast.report is not None
    assert fast.report.chosen == "compiled"
    assert fast.report.compile_seconds is not None
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch.testing.assert_close(fast(images), scores(model, images), rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs  # nothing is compiled again


def test_the_command_says_what_it_brought(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["optimize", "caformer_pico", "--batch", "2", "--image-size", "64", "--compile", "never"]
    assert main(line) == 0
    assert "times as fast" in capsys.readouterr().out
    assert main([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["chosen"] in ("original", "eager", "packed")
    assert found["image_size"] == [64, 64]


def test_the_command_refuses_what_it_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, says in [
        (["caformer_pic"], "caformer_pico"),
        (["caformer_pico", "--batch", "0"], "batch of 1"),
        (["timm:resnet18"], "Mixlab's classifiers"),
        (["caformer_pico", "--out", str(tmp_path / "model.onnx")], ".pt2"),
        (["caformer_pico", "--out", str(tmp_path / "none" / "model.pt2")], "Cannot write"),
    ]:
        assert main(["optimize", *words]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.heavy
@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
def test_the_file_runs_without_compiling_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model.pt2"
    line = ["optimize", "convformer_pico", "--batch", "2", "--image-size", "64", "--compile", "never", "--json"]
    assert main([*line, "--out", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["file_gain"] > 0
    assert open_export(out).run(torch.randn(3, 3, 64, 64)).shape == (3, 1000)
