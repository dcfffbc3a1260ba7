"""A small model compiles whole and block by block; `make compile-all` does every model."""

import shutil
from typing import Any

import pytest
import torch

import mixlab
from mixlab.deploy import compile_blocks
from mixlab.errors import CompileError

OUTPUT_BOUND = 1e-4  # of the logits' std
GRADIENT_BOUND = 1e-3  # of each gradient's largest entry


def check_compiled(model: mixlab.Backbone, side: int, *, whole: bool) -> None:
    """Compiled outputs in eval mode and gradients in train mode equal eager ones."""
    image = torch.randn(2, 3, side, side)
    with torch.no_grad():
        expected = model.eval()(image)
    parameters = [p for p in model.parameters() if p.requires_grad]
    reference = torch.autograd.grad(model.train()(image).square().sum(), parameters)
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, fullgraph=True) if whole else compile_blocks(model)
    with torch.no_grad():
        ours = compiled.eval()(image)
    assert (ours - expected).abs().max() < OUTPUT_BOUND * expected.std()
    gradients = torch.autograd.grad(compiled.train()(image).square().sum(), parameters)
    for gradient, plain in zip(gradients, reference, strict=True):
        assert (gradient - plain).abs().max() <= GRADIENT_BOUND * plain.abs().max()


@pytest.mark.parametrize("whole", [True, False])
def test_a_small_model_compiles_and_equals_eager(whole: bool) -> None:
    model = mixlab.create_model(
        "caformer_pico",
        dims=[16, 32],
        depths=[1, 2],
        mixers=["sepconv", "attention"],
        branch_scale=["none", "res_scale"],
    )
    check_compiled(model, 32, whole=whole)


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
    with pytest.raises(CompileError, match=r"needs a C\+\+ compiler"):
        compile_blocks(mixlab.create_model("caformer_pico"))


@pytest.mark.heavy
@pytest.mark.parametrize("name", mixlab.list_models())
def test_every_model_compiles_and_equals_eager(name: str) -> None:
    check_compiled(mixlab.create_model(name), 64, whole=True)
