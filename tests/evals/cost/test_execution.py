import pytest
import torch

import mixlab
from mixlab.core.errors import CompileError, ConfigError
from mixlab.evals.cost import execution
from mixlab.evals.cost.execution import Execution


def test_inference_has_weights_and_images_in_the_dtype_and_layout() -> None:
    how = Execution(dtype="float64", layout="channels_last")
    model = how.prepare(mixlab.create_model("caformer_pico"))
    images = how.images(model, 2, (32, 48))
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert images.dtype is torch.float64
    assert images.shape == (2, 3, 32, 48)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert not model.training


def test_training_keeps_float32_weights_under_autocast() -> None:
    how = Execution(training=True, dtype="float16")
    model = mixlab.create_model("caformer_pico")
    how.prepare(model)
    seen = []
    model.head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    how.runner(model, how.images(model, 2, (32, 32)))()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert seen == [torch.float16]


@pytest.mark.parametrize("optimizer", ["none", "adamw", "lamb", "sgd"])
def test_only_an_optimizer_moves_the_weights(optimizer: str) -> None:
    how = Execution(training=True, optimizer=optimizer)
    model = how.prepare(mixlab.create_model("caformer_pico", num_classes=3))
    before = [parameter.clone() for parameter in model.parameters()]
    how.runner(model, how.images(model, 2, (32, 32)))()
    moved = any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert moved == (optimizer != "none")
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"dtype": "float3"}, "Did you mean 'float32'"),
        ({"layout": "channel_last"}, "Did you mean 'channels_last'"),
        ({"training": True, "optimizer": "adam"}, "Did you mean 'adamw'"),
        ({"optimizer": "adamw"}, "belongs to a training step"),
    ],
)
def test_unknown_words_are_errors(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Execution(**wrong)  # type: ignore[arg-type]


def test_compiling_without_a_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "has_compiler", lambda: False)
    with pytest.raises(CompileError, match="C\\+\\+ compiler"):
        Execution(compiled=True).check(torch.device("cpu"))
    with pytest.raises(CompileError, match="C\\+\\+ compiler"):
        execution.compile_model(torch.nn.Linear(2, 2))


def test_waiting_is_for_the_device_that_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    execution.wait_for(torch.device("cuda:1"))
    execution.wait_for(torch.device("cpu"))
    assert waited == [torch.device("cuda:1")]


def test_waiting_for_mps_names_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    execution.wait_for(torch.device("mps"))
    assert waited == ["mps"]
