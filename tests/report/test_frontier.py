import pytest

from mixlab.core.errors import ConfigError
from mixlab.report import Budget, frontier, recommend
from mixlab.report.frontier import binomial_error, standard_error
from tests.report.invented import comparison, model, several


def said(recommendation: object) -> str:
    return " ".join(getattr(recommendation, "sentences"))  # noqa: B009


def test_the_frontier_leaves_out_what_is_beaten() -> None:
    models = [
        model("dear_and_best", 98.0, latency_ms=9.0),
        model("beaten", 96.0, latency_ms=7.0),
        model("cheap", 96.5, latency_ms=3.0),
        model("same_accuracy_but_dearer", 96.5, latency_ms=4.0),
        model("unmeasured", 99.0, latency_ms=None),
        model("untrained", latency_ms=1.0),
    ]
    assert [m.name for m in frontier(models, "latency_ms")] == ["cheap", "dear_and_best"]


def test_equals_are_both_on_the_frontier() -> None:
    assert [m.name for m in frontier([model("b", 96.0), model("a", 96.0)], "macs")] == ["a", "b"]


def test_frozen_parameters_cost_too() -> None:
    models = [model("plain", 96.0, params=100), model("random", 97.0, params=90, frozen=20)]
    assert [m.name for m in frontier(models, "params")] == ["plain", "random"]


def test_unknown_costs_are_errors() -> None:
    with pytest.raises(ConfigError, match="latency_ms"):
        frontier([model("a", 1.0)], "latency")


def test_without_a_budget_accuracy_decides() -> None:
    found = recommend(several(4, 3))
    assert (found.chosen, found.runner_up) == ("model_0", "model_1")
    assert "No budget" in said(found)
    assert "a clear lead" in said(found)
    assert found.plain()["fits"] == ["model_0", "model_1", "model_2", "model_3"]


@pytest.mark.parametrize(
    ("budget", "chosen"),
    [
        (Budget(max_ms=18.0), "model_2"),
        (Budget(max_ms=18.5, max_mb=47.0), "model_3"),
        (Budget(max_macs=29_000_000), "model_1"),
        (Budget(max_params=1_000_000), "model_0"),
    ],
)
def test_every_limit_of_the_budget_is_kept(budget: Budget, chosen: str) -> None:
    assert recommend(several(4, 3, budget=budget)).chosen == chosen


def test_the_budget_is_part_of_the_answer() -> None:
    text = said(recommend(several(4, 3, budget=Budget(max_ms=18.0))))
    assert "2 of 4 models fit the budget of 18 ms latency: model_2, model_3." in text


def test_what_was_not_measured_does_not_fit() -> None:
    whole = comparison(model("a", 99.0, peak_mb=None), model("b", 90.0, peak_mb=1.0), budget=Budget(max_mb=10.0))
    assert recommend(whole).fits == ("b",)


def test_nothing_fits_says_by_how_much_the_nearest_misses() -> None:
    whole = comparison(
        model("near", 90.0, latency_ms=6.0), model("far", 99.0, latency_ms=9.0), budget=Budget(max_ms=5.0)
    )
    found = recommend(whole)
    assert (found.chosen, found.runner_up, found.fits) == (None, None, ())
    assert found.headline == "No model fits the budget of 5 ms latency."
    assert "nearest is near with 90.00% top-1: latency 6.00 ms, 1.00 ms (20%) over the limit of 5 ms" in said(found)


def test_exact_ties_go_to_the_cheaper() -> None:
    whole = comparison(model("dear", 97.0, latency_ms=9.0), model("cheap", 97.0, latency_ms=3.0), test_images=None)
    assert recommend(whole).chosen == "cheap"


def test_cheaper_is_meant_in_the_cost_of_the_budget() -> None:
    fast = model("fast", 97.0, latency_ms=3.0, peak_mb=20.0)
    slim = model("slim", 97.0, latency_ms=9.0, peak_mb=10.0)
    assert recommend(comparison(fast, slim, budget=Budget(max_mb=50.0))).chosen == "slim"
    assert recommend(comparison(fast, slim)).chosen == "fast"


def test_a_lead_within_the_spread_goes_to_the_cheaper() -> None:
    dear = model("dear", 96.0, 97.0, 98.3, latency_ms=9.0)
    cheap = model("cheap", 96.0, 97.0, 98.0, latency_ms=3.0)
    found = recommend(comparison(dear, cheap))
    assert (found.chosen, found.runner_up) == ("cheap", "dear")
    assert "lead of 0.10 points over cheap is within noise" in said(found)
    assert "3.00 ms against 9.00 ms latency" in said(found)


def test_a_lead_beyond_the_spread_is_not_given_away() -> None:
    dear = model("dear", 97.0, 97.1, 97.2, latency_ms=9.0)
    cheap = model("cheap", 96.8, 96.9, 97.0, latency_ms=3.0)
    found = recommend(comparison(dear, cheap))
    assert found.chosen == "dear"
    assert "0.20 points behind: a clear lead" in said(found)


def test_one_seed_is_judged_by_the_size_of_the_test_set() -> None:
    dear, cheap = model("dear", 97.5, latency_ms=9.0), model("cheap", 97.0, latency_ms=3.0)
    small, large = comparison(dear, cheap, test_images=400), comparison(dear, cheap, test_images=100_000)
    assert recommend(small).chosen == "cheap"
    assert "one seed on 400 test images: it cannot separate models closer than about 1.16 points" in said(
        recommend(small)
    )
    assert recommend(large).chosen == "dear"
    assert "a clear lead" in said(recommend(large))


def test_between_one_and_two_errors_a_lead_is_weak() -> None:
    found = recommend(comparison(model("a", 98.0), model("b", 96.5), test_images=400))
    assert found.chosen == "a"
    assert "a weak lead" in said(found)


def test_one_seed_on_an_unknown_test_set_says_so() -> None:
    assert "unknown size" in said(recommend(comparison(model("a", 98.0), model("b", 96.5), test_images=None)))


def test_a_single_model_is_recommended_without_rivals() -> None:
    found = recommend(comparison(model("only", 97.0), budget=Budget(max_ms=9.0)))
    assert (found.chosen, found.runner_up) == ("only", None)
    assert "It fits the budget of 9 ms latency. Only one model was compared" in said(found)


def test_no_accuracies_no_recommendation() -> None:
    assert recommend(comparison(model("a"), model("b"))).headline == "No model could be trained."


def test_errors_by_hand() -> None:
    assert binomial_error(90.0, 900) == pytest.approx(1.0)
    assert standard_error(model("a", 90.0), model("b", 90.0), 900) == pytest.approx(2**0.5)
    two = model("a", 96.0, 98.0), model("b", 96.0, 98.0)
    assert standard_error(*two, 900) == pytest.approx(2**0.5)
