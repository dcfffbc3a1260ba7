import pytest
import torch
import torch.nn.functional as F

from mixlab.errors import ConfigError, MacsError
from mixlab.evals.bench_activations import (
    BASELINE,
    FORMULAS,
    FlopCounter,
    bench_activations,
    flops_per_unit,
    gelu_equation_9,
)
from mixlab.evals.turns import Plan

QUICK = Plan(seconds=0.01, least=2, most=2, warmup=1)


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
    monkeypatch.setattr("mixlab.evals.execution.has_compiler", lambda: False)
    found, figures = bench_activations(units=64, plan=QUICK, compiled=True)
    assert len(found.data["rows"]) == len(FORMULAS)
    assert all("C++ compiler" in row["reason"] for row in found.data["rows"])
    assert figures == {}


def test_an_unknown_activation_is_an_error() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'StarReLU'"):
        bench_activations(["StarRelu"])
