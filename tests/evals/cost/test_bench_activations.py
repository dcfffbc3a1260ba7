import pytest
import torch
import torch.nn.functional as F

from mixlab.core.errors import ConfigError, MacsError, TrainingError
from mixlab.evals.cost import bench_activations as module
from mixlab.evals.cost.bench_activations import (
    BASELINE,
    FORMULAS,
    FlopCounter,
    bench_activations,
    flops_per_unit,
    gelu_equation_9,
)
from mixlab.metrics.timing import Rounds, Run

QUICK = Rounds(seconds=0.01, least=2, most=2, warmup=1)


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("ReLU", 1),
        ("GELU (PyTorch)", 14),
        (BASELINE, 14),
        ("Squared ReLU", 2),
        ("StarReLU", 4),
        ("StarReLU, constants", 4),
        ("StarReLU, learned scale", 3),
        ("StarReLU, learned bias", 3),
        ("StarReLU, constant scale", 3),
        ("StarReLU, constant bias", 3),
    ],
)
def test_flops_per_unit_are_the_papers(name: str, flops: int) -> None:
    assert flops_per_unit(name) == flops


def test_an_operator_that_nobody_counted_is_an_error() -> None:
    with pytest.raises(MacsError, match="not guessed"), FlopCounter():
        torch.sigmoid(torch.ones(1))


def test_equation_9_is_the_approximation_of_gelu() -> None:
    x = torch.linspace(-4, 4, 101)
    torch.testing.assert_close(gelu_equation_9(x), F.gelu(x, approximate="tanh"))


@pytest.mark.parametrize("name", list(FORMULAS))
def test_what_is_timed_is_what_is_counted(name: str) -> None:
    x, scale, bias = torch.linspace(-4, 4, 101), torch.tensor([0.9]), torch.tensor([-0.4])
    formula = FORMULAS[name]
    close = 1e-3 if name == "GELU (PyTorch)" else 1e-6  # the exact function, not its approximation
    fast = (formula.fast or formula.written)(x, scale, bias)
    torch.testing.assert_close(fast, formula.written(x, scale, bias), atol=close, rtol=close)


@pytest.mark.parametrize("training", [False, True])
def test_the_baseline_always_runs_and_has_a_ratio_of_one(training: bool) -> None:
    found, figures = bench_activations(["StarReLU"], units=64, plan=QUICK, training=training, threads=1)
    baseline, star = found.data["rows"]
    assert (baseline["activation"], baseline["ratio"]) == (BASELINE, 1.0)
    assert star["ratio"] > 0
    assert star["mode"] == ("training" if training else "inference")
    assert star["runs_per_second"] == pytest.approx(1e3 / star["best_ms"])
    assert set(figures) == {"activations"}


def test_without_a_compiler_every_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mixlab.evals.cost.execution.has_compiler", lambda: False)
    found, figures = bench_activations(units=64, plan=QUICK, compiled=True)
    assert len(found.data["rows"]) == len(FORMULAS)
    assert all("C++ compiler" in row["reason"] for row in found.data["rows"])
    assert figures == {}


def test_an_unknown_activation_is_an_error() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'StarReLU'"):
        bench_activations(["StarRelu"])


def test_activations_run_on_the_device_and_wait_once_for_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    devices: list[str] = []

    def relu(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        devices.extend(tensor.device.type for tensor in (x, scale, bias))
        return torch.relu(x)

    def once(runs: dict[str, Run], plan: Rounds) -> dict[str, list[float]]:
        waited.clear()
        devices.clear()
        runs["ReLU"]()
        return {name: [2.0, 4.0] for name in runs}

    monkeypatch.setitem(module.FORMULAS, "ReLU", module.Formula("Equation 7", relu))
    monkeypatch.setattr(module, "flops_per_unit", lambda name: 1)
    monkeypatch.setattr(module, "wait_for", waited.append)
    monkeypatch.setattr(module, "take_turns", once)
    found, _ = bench_activations(["ReLU"], units=64, device="meta")
    row = found.data["rows"][0]
    assert (row["activation"], row["device"], row["calls"]) == ("ReLU", "meta", module.CALLS)
    assert waited == [torch.device("meta")]
    assert devices == ["meta"] * 3 * module.CALLS
    assert row["best_ms"] == pytest.approx(2e3 / module.CALLS)


def test_a_timed_run_on_a_cpu_is_one_call() -> None:
    found, _ = bench_activations(["ReLU"], units=64, plan=QUICK)
    assert {(row["device"], row["calls"]) for row in found.data["rows"]} == {("cpu", 1)}


def test_the_device_of_activations_is_checked_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(module, "take_turns", lambda *_: pytest.fail("it ran"))
    with pytest.raises(TrainingError, match="no CUDA device"):
        bench_activations(device="cuda")


def test_activations_have_no_products_that_could_be_tf32() -> None:
    with pytest.raises(ConfigError, match="no products"):
        bench_activations(["ReLU"], units=64, dtype="tf32")
