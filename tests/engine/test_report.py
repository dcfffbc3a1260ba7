"""What runs where, in words."""

import json

import pytest
import torch
from torch import Tensor, nn

import mixlab
from mixlab.cli import main
from mixlab.core.grid import Grid
from mixlab.engine.kernels import has_wide_vectors
from mixlab.models.mixers import Mixer

needs_kernels = pytest.mark.skipif(not has_wide_vectors(), reason="plans are for kernels with vectors of 8 or more")


def model_of(name: str = "convformer_pico") -> mixlab.Backbone:
    torch.manual_seed(0)
    return mixlab.create_model(name, image_size=64).eval()


class Flipped(Mixer):
    """A mixer that nobody has lowered."""

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        return tokens.flip(1)


@needs_kernels
def test_every_block_is_named_with_its_kernels() -> None:
    parts = {part.path: part for part in model_of().engine_report().parts}
    assert parts["stages.0.blocks.0.token"].steps[-3:] == ("linear", "depthwise", "linear")
    assert not parts["stages.0.blocks.0.token"].reason


@needs_kernels
def test_an_unknown_mixer_runs_as_pytorch_in_the_middle_of_the_plan() -> None:
    model, image = model_of(), torch.randn(2, 3, 64, 64)
    model.stages[1].blocks[0].token.branches[0].mixer = Flipped()
    report = model.engine_report(image)
    reasons = {part.path: part.reason for part in report.parts}
    assert reasons["stages.1.blocks.0.token"] == "there is no lowering for Flipped"
    assert not reasons["stages.1.blocks.0.channel"]
    assert report.calls >= 2
    wanted = mixlab.create_model("convformer_pico", image_size=64).eval().double()
    wanted.load_state_dict(model.state_dict(), strict=False)
    wanted.stages[1].blocks[0].token.branches[0].mixer = Flipped()
    with torch.inference_mode():
        expected = wanted(image.double())
        assert (model(image) - expected).abs().max() < 1e-5 * expected.abs().max()


@needs_kernels
@pytest.mark.parametrize("change", ["hook", "forward", "subclass"])
def test_a_part_that_somebody_has_changed_says_so(change: str) -> None:
    model = model_of()
    layer = model.stages[0].blocks[0].channel.branches[0].mixer.fc1  # type: ignore[union-attr]
    if change == "hook":
        layer.register_forward_hook(lambda *_: None)
    elif change == "forward":
        layer.forward = lambda x: 0 * x
    else:
        layer.__class__ = type("Own", (nn.Linear,), {})
    reasons = {part.path: part.reason for part in model.engine_report().parts}
    said = {
        "hook": "somebody listens to a Linear",
        "forward": "a Linear has a forward of its own",
        "subclass": "Own is not known to the engine",
    }
    assert reasons["stages.0.blocks.0.channel"] == said[change]
    assert not reasons["stages.0.blocks.0.token"]


def test_a_model_in_training_is_left_to_pytorch_as_a_whole() -> None:
    assert str(model_of().train().engine_report()) == "Everything runs as PyTorch: the model is in training mode."


@needs_kernels
def test_info_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "convformer_pico", "--engine"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("stages.0.blocks.0.token") and "kernels:" in line for line in lines)
    main(["info", "convformer_pico", "--engine", "--json"])
    rows = json.loads(capsys.readouterr().out)["parts"]
    assert {row["runs_on"] for row in rows} >= {"kernels"}
