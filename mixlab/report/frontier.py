"""Which model to take: the accuracy/cost frontier, and a recommendation in plain sentences."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mixlab.core.errors import ConfigError, near_misses
from mixlab.findings.results import Budget, Comparison, ModelResult
from mixlab.report.costs import COSTS, CostColumn, short

ALONE = "Only one model was compared, so there is nothing to choose between."
CLEAR = 2.0  # a lead of this many standard errors is called clear; one of less than one is a tie


@dataclass(frozen=True)
class Recommendation:
    """`chosen` is None where no model fits the budget. `sentences` say why, most important first."""

    chosen: str | None
    runner_up: str | None
    headline: str
    sentences: tuple[str, ...]
    fits: tuple[str, ...]  # names within the budget, most accurate first

    def plain(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


def frontier(models: Iterable[ModelResult], cost: str) -> tuple[ModelResult, ...]:
    """Models that no other beats in accuracy without costing more, cheapest first. The unmeasured are left out."""
    if cost not in COSTS:
        raise ConfigError(f"Unknown cost {cost!r}. {near_misses(cost, COSTS)}")
    known = []
    for model in models:
        price, accuracy = COSTS[cost].of(model), model.mean
        if price is not None and accuracy is not None:
            known.append((price, accuracy, model))

    def beaten(price: float, accuracy: float) -> bool:
        return any(p <= price and a >= accuracy and (p < price or a > accuracy) for p, a, _ in known)

    best = [entry for entry in known if not beaten(entry[0], entry[1])]
    return tuple(model for _, _, model in sorted(best, key=lambda entry: (entry[0], entry[2].name)))


def recommend(comparison: Comparison) -> Recommendation:
    """The most accurate model within the budget; of models that the measurement cannot separate, the cheapest."""
    trained = [model for model in comparison.ranked() if model.mean is not None]
    fitting = [model for model in trained if not misses(model, comparison.budget)]
    fits = tuple(model.name for model in fitting)
    if not trained:
        return Recommendation(None, None, "No model could be trained.", ("There are no accuracies to compare.",), ())
    if not fitting:
        return nothing_fits(trained, comparison.budget)
    cost = deciding_cost(fitting, comparison.budget)
    best = fitting[0]
    tied = [model for model in fitting if model is best or is_tie(best, model, comparison)]
    chosen = min(tied, key=lambda model: price_list(model, cost))
    others = [model for model in fitting if model is not chosen]
    runner_up = others[0] if others else None
    sentences = [within(comparison, trained, fitting)]
    if chosen is not best:
        sentences.append(
            f"{best.name} has the highest top-1 ({show_accuracy(best)}), but its lead of {lead(best, chosen):.2f} "
            f"points over {chosen.name} is within noise, so the cheaper one wins: {compare_cost(chosen, best, cost)}."
        )
    else:
        sentences.append(first_place(chosen, fitting, cost))
    if runner_up is not None and chosen is best:
        sentences.append(second_place(chosen, runner_up, comparison, cost))
    sentences.append(caveat(chosen, runner_up, comparison))
    headline = f"Take {chosen.name}: {show_accuracy(chosen)} top-1{costs_in_brief(chosen)}."
    second = runner_up.name if runner_up else None
    return Recommendation(chosen.name, second, headline, tuple(text for text in sentences if text), fits)


# -- noise ---------------------------------------------------------------------------------------


def standard_error(one: ModelResult, other: ModelResult, test_images: int | None) -> float | None:
    """Of the difference of two accuracies in points: from the seeds, else from the size of the test set; else None.

    The same test images for both make the true error of a single seed's difference smaller than this.
    """
    if one.spread is not None and other.spread is not None:
        return math.sqrt(one.spread**2 / len(one.top1) + other.spread**2 / len(other.top1))
    if not test_images or one.mean is None or other.mean is None:
        return None
    return math.hypot(binomial_error(one.mean, test_images), binomial_error(other.mean, test_images))


def binomial_error(percent: float, images: int) -> float:
    share = percent / 100
    return 100 * math.sqrt(share * (1 - share) / images)


def is_tie(one: ModelResult, other: ModelResult, comparison: Comparison) -> bool:
    error = standard_error(one, other, comparison.test_images)
    return lead(one, other) == 0 or (error is not None and abs(lead(one, other)) < error)


def lead(one: ModelResult, other: ModelResult) -> float:
    """In points; of models with accuracies."""
    return (one.mean or 0.0) - (other.mean or 0.0)


def caveat(one: ModelResult, other: ModelResult | None, comparison: Comparison) -> str:
    """How far the numbers can be trusted."""
    images = comparison.test_images
    if one.spread is not None:
        judged = "a lead below one standard error is a tie, one below two is weak"
        return f"Noise is judged from the spread over {len(one.top1)} seeds: {judged}." if other else ""
    if not images or one.mean is None:
        return "This is one seed on a test set of unknown size: small differences mean nothing."
    start = f"This is one seed on {images} test images:"
    error = standard_error(one, other, images) if other else None
    if error is None:
        return f"{start} the accuracy itself is only known to about {binomial_error(one.mean, images):.2f} points."
    return (
        f"{start} it cannot separate models closer than about {error:.2f} points (the binomial error of their "
        f"difference). More seeds can."
    )


# -- sentences -----------------------------------------------------------------------------------


def show_accuracy(model: ModelResult) -> str:
    if model.mean is None:
        return "no accuracy"
    return f"{model.mean:.2f}%" if model.spread is None else f"{model.mean:.2f} ± {model.spread:.2f}%"


def costs_in_brief(model: ModelResult) -> str:
    known = [(cost, cost.of(model)) for cost in COSTS.values() if cost.name in ("latency_ms", "peak_mb")]
    texts = [f"{cost.show(value)} {cost.label}" for cost, value in known if value is not None]
    return "".join(f", {text}" for text in texts)


def show_budget(budget: Budget) -> str:
    limits = [(cost, cost.limit(budget)) for cost in COSTS.values()]
    return " and ".join(f"{short(cost.show(limit))} {cost.label}" for cost, limit in limits if limit is not None)


def within(comparison: Comparison, trained: Sequence[ModelResult], fitting: Sequence[ModelResult]) -> str:
    budget = show_budget(comparison.budget)
    if not budget:
        return ALONE if len(trained) == 1 else "No budget was given, so accuracy decides."
    if len(trained) == 1:
        return f"It fits the budget of {budget}. {ALONE}"
    if len(fitting) == len(trained):
        return f"All {len(trained)} models fit the budget of {budget}, so accuracy decides."
    verb = "fits" if len(fitting) == 1 else "fit"
    names = ", ".join(model.name for model in fitting)
    return f"{len(fitting)} of {len(trained)} models {verb} the budget of {budget}: {names}."


def first_place(chosen: ModelResult, fitting: Sequence[ModelResult], cost: CostColumn) -> str:
    if len(fitting) == 1:
        return ""
    equals = [model for model in fitting if model is not chosen and lead(chosen, model) == 0]
    if equals:
        names = " and ".join(model.name for model in equals)
        return f"{chosen.name} is as accurate as {names} and has the lowest {cost.label} of them."
    return f"{chosen.name} has the highest top-1 of these {len(fitting)}."


def second_place(chosen: ModelResult, other: ModelResult, comparison: Comparison, cost: CostColumn) -> str:
    difference = lead(chosen, other)
    error = standard_error(chosen, other, comparison.test_images)
    compared = compare_cost(other, chosen, cost)
    start = f"The runner-up is {other.name} with {show_accuracy(other)} ({compared})"
    if difference == 0:
        return f"{start}."
    if error is None:
        return f"{start}, {difference:.2f} points behind."
    if difference < error:
        return f"{start}: {difference:.2f} points behind, which is within noise; {chosen.name} is also the cheaper one."
    sure = "a clear lead" if difference >= CLEAR * error else "a weak lead that more seeds would have to confirm"
    return f"{start}, {difference:.2f} points behind: {sure}."


def compare_cost(one: ModelResult, other: ModelResult, cost: CostColumn) -> str:
    mine, theirs = cost.of(one), cost.of(other)
    if mine is None or theirs is None:
        return f"{cost.label} not measured"
    return f"{cost.show(mine)} against {cost.show(theirs)} {cost.label}"


# -- costs ---------------------------------------------------------------------------------------


def deciding_cost(models: Sequence[ModelResult], budget: Budget) -> CostColumn:
    """What "cheaper" means: the first cost with a limit, else latency, else what is always known."""
    limited = [cost for cost in COSTS.values() if cost.limit(budget) is not None]
    measured = [cost for cost in COSTS.values() if all(cost.of(model) is not None for model in models)]
    preferred = [cost for cost in measured if cost.name in ("latency_ms", "macs")]
    return (limited or preferred)[0]


def price_list(model: ModelResult, cost: CostColumn) -> tuple[float | str, ...]:
    """For sorting: the deciding cost, then the others that are always known, then the name."""
    price = cost.of(model)
    return (math.inf if price is None else price, model.macs, model.params + model.frozen, model.name)


def misses(model: ModelResult, budget: Budget) -> list[tuple[CostColumn, float | None, float]]:
    """Each limit that a model does not keep: the cost, its value (None if not measured) and the limit."""
    found = []
    for cost in COSTS.values():
        limit, price = cost.limit(budget), cost.of(model)
        if limit is not None and (price is None or price > limit):
            found.append((cost, price, limit))
    return found


def nothing_fits(models: Sequence[ModelResult], budget: Budget) -> Recommendation:
    def overrun(model: ModelResult) -> float:
        return max(math.inf if price is None else price / limit for _, price, limit in misses(model, budget))

    nearest = min(models, key=lambda model: (overrun(model), model.name))
    texts = []
    for cost, price, limit in misses(nearest, budget):
        if price is None:
            texts.append(f"its {cost.label} was not measured")
        else:
            over = f"{cost.show(price - limit)} ({price / limit - 1:.0%})"
            texts.append(f"{cost.label} {cost.show(price)}, {over} over the limit of {short(cost.show(limit))}")
    sentence = f"The nearest is {nearest.name} with {show_accuracy(nearest)} top-1: {'; '.join(texts)}."
    advice = "Raise the budget, or compare smaller models or smaller images."
    return Recommendation(None, None, f"No model fits the budget of {show_budget(budget)}.", (sentence, advice), ())
