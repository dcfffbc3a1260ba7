"""A small model compiles whole and block by block; `make compile-all` does every model."""

import copy
import shutil
from typing import Any

import pytest
import torch

import mixlab
from mixlab.core.errors import CompileError
from mixlab.deploy import compile_blocks
from mixlab.engine import compiled as compiled_parts
from mixlab.models.mixers import Mixer

OUTPUT_BOUND = 1e-4  # of the logits' std
GRADIENT_BOUND = 1e-3  # of each gradient's largest entry, ...
CANCELLATION = 1e-5  # ... plus this share of the model's largest: sums of millions that nearly cancel keep few digits


def prepare(model: mixlab.Backbone, side: int) -> tuple[torch.Tensor, list[torch.nn.Parameter]]:
    torch._dynamo.reset()
    torch.nn.init.normal_(model.get_parameter("head.classifier.weight"), std=0.02)  # Sequencer's starts at zero
    return torch.randn(2, 3, side, side), [p for p in model.parameters() if p.requires_grad]


@torch.no_grad()
def check_outputs(model: mixlab.Backbone, compiled: Any, image: torch.Tensor) -> None:
    """Compiled outputs in eval mode equal those of an eager copy."""
    expected = copy.deepcopy(model).eval()(image)
    model.eval()
    assert (compiled(image) - expected).abs().max() < OUTPUT_BOUND * expected.std()


def check_gradients(
    model: mixlab.Backbone, compiled: Any, image: torch.Tensor, parameters: list[torch.nn.Parameter]
) -> None:
    """Compiled gradients in train mode equal those of an eager copy."""
    eager = copy.deepcopy(model).train()
    eager(image).square().sum().backward()
    reference = [p.grad for p in eager.parameters() if p.requires_grad and p.grad is not None]
    model.train()
    gradients = torch.autograd.grad(compiled(image).square().sum(), parameters)
    noise = CANCELLATION * max(plain.abs().max() for plain in reference)
    for gradient, plain in zip(gradients, reference, strict=True):
        assert (gradient - plain).abs().max() <= GRADIENT_BOUND * plain.abs().max() + noise


def check_compiled(model: mixlab.Backbone, side: int, *, whole: bool) -> None:
    image, parameters = prepare(model, side)
    compiled = torch.compile(model, fullgraph=True) if whole else compile_blocks(model)
    check_outputs(model, compiled, image)
    check_gradients(model, compiled, image, parameters)


@pytest.mark.parametrize("whole", [True, False])
def test_a_small_model_compiles_and_equals_eager(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_parts, "serves_compiled_code", lambda: False)  # as where there are no kernels
    model = mixlab.create_model(
        "caformer_pico",
        dims=[16, 32],
        depths=[1, 2],
        mixers=["sepconv", "attention"],
        branch_scale=["none", "res_scale"],
    )
    check_compiled(model, 32, whole=whole)


def test_a_recurrent_model_compiles_for_inference_and_trains_eager() -> None:
    model = mixlab.create_model("sequencer2d_pico", dims=[16, 16, 16, 16], depths=[1, 1, 1, 1])
    check_compiled(model, 32, whole=False)


def test_skipped_samples_are_masked_in_compiled_code() -> None:
    torch._dynamo.reset()
    skip = {"rate": 0.5, "schedule": "constant", "form": "skip"}
    model = mixlab.create_model("convformer_pico", dims=[8, 8], depths=[1, 1], branch_scale="none", drop_path=skip)
    compile_blocks(model, backend="aot_eager").train()
    model(torch.randn(4, 3, 32, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_serial_and_parallel_blocks_share_their_graphs() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = mixlab.create_model("coat_tiny", dims=[16] * 4, depths=[1] * 4, image_size=64).eval()
    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = model(image)
        compile_blocks(model, backend="aot_eager")
        torch.testing.assert_close(model(image), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 8  # attention and MLP on four grids


def test_blocks_of_a_kind_share_one_graph_also_with_ramped_drop_rates() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    frame: dict[str, Any] = {"dims": [16, 32], "depths": [4, 3], "branch_scale": "none"}
    model = mixlab.create_model("convformer_pico", mixers="pool", drop_path=0.3, **frame)
    compile_blocks(model, backend="aot_eager").train()
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3  # two kinds; the first block never drops


def test_a_missing_compiler_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    model = mixlab.create_model("caformer_pico")
    with pytest.raises(CompileError, match=r"needs a C\+\+ compiler"):
        compile_blocks(model)
    assert compile_blocks(model, fallback=True) is model
    assert all(block._compiled_call_impl is None for block in model.blocks.values())


@pytest.mark.heavy
@pytest.mark.parametrize("name", mixlab.list_models())
def test_every_model_compiles_and_equals_eager(name: str) -> None:
    """Outputs of the whole graph, gradients of the whole graph as captured, and gradients of the compiled blocks."""
    model = mixlab.create_model(name, drop_path=0.0)  # chance would make the two runs differ
    image, parameters = prepare(model, 64)
    check_outputs(model, torch.compile(model, fullgraph=True), image)
    if all(module.trains_compiled for module in model.modules() if isinstance(module, Mixer)):
        captured = torch.compile(model, fullgraph=True, backend="aot_eager")
        check_gradients(model, captured, image, parameters)
    torch._dynamo.reset()
    check_gradients(model, compile_blocks(model), image, parameters)


def test_a_compiled_model_keeps_the_dtype_of_autocast() -> None:
    model = mixlab.create_model("vil_pico").eval()
    compiled, image = compile_blocks(copy.deepcopy(model), backend="aot_eager"), torch.randn(1, 3, 32, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        assert compiled.pyramid(image)[0].dtype is model.pyramid(image)[0].dtype


@pytest.mark.parametrize(
    ("name", "depths"),
    [
        pytest.param("hpx_former_pico", [1, 1, 1, 1], marks=pytest.mark.heavy),
        pytest.param("hb_former_pico", [1, 1, 1, 1], marks=pytest.mark.heavy),
        ("vil_pico", [2]),
    ],
)
def test_a_whole_model_is_one_graph_with_the_same_outputs_and_gradients(name: str, depths: list[int]) -> None:
    """The graph as it is captured; `make compile-all` turns every model's into code."""
    model = mixlab.create_model(name, drop_path=0.0, depths=depths)
    image, parameters = prepare(model, 40)
    captured = torch.compile(model, fullgraph=True, backend="aot_eager")
    check_outputs(model, captured, image)
    check_gradients(model, captured, image, parameters)
    check_outputs(model, captured, torch.randn(3, 3, 48, 33))  # sizes that the first graph does not know
