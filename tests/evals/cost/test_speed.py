import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import mixlab
from mixlab.core.errors import ConfigError, MixlabError
from mixlab.evals.cost import speed
from mixlab.evals.cost.speed import latency_ms, measure_speed, peak_memory_mb
from mixlab.evals.subjects import open_subject
from mixlab.metrics.timing import Timing, time_rounds


@pytest.mark.parametrize("training", [False, True])
def test_speed_is_of_the_best_round(training: bool) -> None:
    found = measure_speed(mixlab.create_model("caformer_pico"), 32, batch=2, seconds=0.02, rounds=3, training=training)
    assert found.images_per_second == pytest.approx(2 / found.timing.best)
    assert found.batch_ms == pytest.approx(1e3 * found.timing.best)
    assert found.timing.best <= found.timing.median
    assert (found.timing.rounds, found.batch, found.image_size, found.training) == (3, 2, (32, 32), training)
    assert found.threads == torch.get_num_threads()
    assert json.loads(json.dumps(found.plain())) == found.plain()


def test_latency_is_of_one_image() -> None:
    model = mixlab.create_model("caformer_pico", in_channels=1)
    seen = []
    model.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape))
    assert latency_ms(model, (32, 48), seconds=0.01, rounds=1) > 0
    assert set(seen) == {(1, 1, 32, 48)}


@pytest.mark.parametrize("training", [False, True])
def test_the_model_is_left_as_it_was(training: bool) -> None:
    model = mixlab.create_model("caformer_pico")
    model(torch.randn(1, 3, 32, 32)).sum().backward()
    model.stages[0].eval()
    model.norms = torch.nn.BatchNorm1d(2)  # a buffer that training would change
    model.register_forward_hook(lambda module, inputs, output: module.norms(output[:, :2]))
    modes = [module.training for module in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    random = torch.get_rng_state()
    measure_speed(model, 32, batch=2, seconds=0.01, rounds=1, training=training)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is gradients[name] for name, parameter in model.named_parameters())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_inference_keeps_nothing_for_gradients() -> None:
    model = mixlab.create_model("caformer_pico")
    seen = []
    model.register_forward_hook(lambda module, inputs, output: seen.append(output.is_inference()))
    measure_speed(model, 32, batch=1, seconds=0.01, rounds=1)
    assert all(seen)


def test_a_foreign_module_is_an_error() -> None:
    with pytest.raises(ConfigError, match="Mixlab model"):
        measure_speed(torch.nn.Linear(2, 2), 32, batch=1)


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"batch": 1, "seconds": 0.0}, {"batch": 1, "rounds": 0}])
def test_nothing_to_measure_is_an_error(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        measure_speed(mixlab.create_model("caformer_pico"), 32, **wrong)  # type: ignore[arg-type]


def test_rounds_take_turns_and_the_first_is_left_out() -> None:
    turns: list[str] = []

    def slow() -> None:
        turns.append("slow")
        time.sleep(0.2 if len(turns) < 3 else 0.02)

    found = time_rounds({"slow": slow, "fast": lambda: turns.append("fast")}, rounds=3)
    assert turns == ["slow", "fast", "slow", "fast", "fast", "slow", "slow", "fast"]
    assert 0.02 <= found["slow"].best < 0.2
    assert found["fast"].best < found["slow"].best
    assert found["slow"].rounds == 3


def test_timing_of_known_seconds() -> None:
    timing = Timing.of([3.0, 2.0, 4.0])
    assert timing.plain() == {"best": 2.0, "median": 3.0, "spread": 1.0, "rounds": 3}


def test_peak_memory_holds_weights_and_activations() -> None:
    model = mixlab.create_model("caformer_pico")
    weights = sum(parameter.nbytes for parameter in model.parameters()) / 2**20
    small, large = peak_memory_mb("caformer_pico", 32), peak_memory_mb("caformer_pico", 32, batch=256)
    assert weights <= small < weights + 40
    assert small + 40 < large < 1000


def test_peak_memory_of_a_weight_file_for_training(tmp_path: Path) -> None:
    path = tmp_path / "tiny.safetensors"
    mixlab.save_weights(mixlab.create_model("caformer_pico", num_classes=10, in_channels=1), path)
    assert peak_memory_mb(path, 32, batch=64, training=True) > peak_memory_mb(str(path), 32, batch=64)


def test_unknown_names_are_errors_before_a_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "run_child", lambda *_: pytest.fail("started"))
    with pytest.raises(ConfigError, match="Did you mean 'caformer_pico'"):
        peak_memory_mb("caformer_pic", 32)
    with pytest.raises(ConfigError, match="plain values"):
        peak_memory_mb("caformer_pico", 32, overrides={"num_classes": object()})


def test_what_the_process_says_reaches_the_user() -> None:
    with pytest.raises(ConfigError, match=r"'caformer_pico'.*Unknown model option 'num_clases'"):
        peak_memory_mb("caformer_pico", 32, overrides={"num_clases": 3})


def test_a_process_that_takes_too_long_is_an_error() -> None:
    with pytest.raises(MixlabError, match=r"not known after 0\.05 seconds"):
        peak_memory_mb("caformer_pico", 32, limit_seconds=0.05)


@pytest.mark.parametrize(("code", "said"), [(-9, "memory ran out"), (-11, "signal 11"), (1, "code 1")])
def test_a_process_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch, code: int, said: str) -> None:
    done = subprocess.CompletedProcess([sys.executable], code, stdout="", stderr="Traceback\nlast words")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(MixlabError, match=f"{said}.*last words"):
        peak_memory_mb("caformer_pico", 32)


def test_without_proc_the_peak_comes_from_getrusage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = speed.peak()
    monkeypatch.setattr(speed, "STATUS", tmp_path / "none")
    monkeypatch.setattr(speed, "CLEAR", tmp_path / "none" / "none")
    assert speed.reset_peak() >= 0.9 * known


def test_a_model_of_timm_has_a_speed_with_its_channels() -> None:
    subject = open_subject("timm:resnet18", num_classes=3)
    found = measure_speed(subject.model, 32, batch=2, seconds=0.01, rounds=1, in_channels=subject.in_channels)
    assert found.images_per_second > 0


def test_peak_memory_of_a_model_of_timm_in_another_dtype() -> None:
    single = peak_memory_mb("timm:resnet18", 64, overrides={"num_classes": 3})
    half = peak_memory_mb("timm:resnet18", 64, overrides={"num_classes": 3}, execution={"dtype": "float16"})
    weights = 11.18e6 * 4 / 2**20
    assert weights < single < weights + 40
    assert half < single - weights / 3


def test_peak_memory_counts_the_state_of_an_optimizer() -> None:
    words = {"batch": 2, "training": True}
    plain = peak_memory_mb("caformer_pico", 32, **words)  # type: ignore[arg-type]
    moments = peak_memory_mb("caformer_pico", 32, execution={"optimizer": "adamw"}, **words)  # type: ignore[arg-type]
    weights = sum(parameter.nbytes for parameter in mixlab.create_model("caformer_pico").parameters()) / 2**20
    assert moments > plain + weights


def test_peak_memory_of_an_unknown_model_of_timm_is_an_error() -> None:
    with pytest.raises(ConfigError, match="timm has no model 'resnet1'"):
        peak_memory_mb("timm:resnet1", 32)
