import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixlab.core.errors import ConfigError
from mixlab.metrics.timing import Ratio, Rounds, percentiles, take_turns


class FakeTime:
    """A clock that only moves when something runs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turns: list[str] = []

    def __call__(self) -> float:
        return self.now

    def lasting(self, name: str, *seconds: float):  # type: ignore[no-untyped-def]
        """A run that takes these seconds in turn."""

        def run() -> None:
            self.now += seconds[self.turns.count(name) % len(seconds)]
            self.turns.append(name)

        return run


def test_every_other_round_goes_backwards_behind_the_warm_up() -> None:
    clock = FakeTime()
    runs = {"a": clock.lasting("a", 1.0), "b": clock.lasting("b", 2.0)}
    seconds = take_turns(runs, Rounds(seconds=1.0, least=3, most=3, warmup=2), clock=clock)
    assert clock.turns == ["a", "a", "b", "b", "a", "b", "b", "a", "a", "b"]
    assert seconds == {"a": [1.0] * 3, "b": [2.0] * 3}


def test_a_single_run_ends_after_its_seconds() -> None:
    clock = FakeTime()
    seconds = take_turns({"a": clock.lasting("a", 0.5)}, Rounds(seconds=10.0, least=2), clock=clock)
    assert len(seconds["a"]) == 20


def test_the_least_number_of_rounds_wins_over_the_seconds() -> None:
    clock = FakeTime()
    seconds = take_turns({"a": clock.lasting("a", 5.0)}, Rounds(seconds=1.0, least=7), clock=clock)
    assert len(seconds["a"]) == 7


def test_a_pair_goes_on_until_its_ratio_is_known() -> None:
    def rounds(*noise: float) -> int:
        clock = FakeTime()
        runs = {"own": clock.lasting("own", 1.0), "peer": clock.lasting("peer", *noise)}
        return len(take_turns(runs, Rounds(seconds=20.0, least=5, patience=4.0), clock=clock)["own"])

    assert rounds(1.0) == 10  # 20 seconds are enough
    assert rounds(0.5, 1.5, 1.0) > 30  # it never settles: until patience ends


def test_the_ratio_of_a_model_with_itself_survives_a_busy_machine() -> None:
    """What slows both halves of a pair does not move the ratio, however much it moves the times."""
    busy = [1.0, 5.0, 2.0, 9.0, 1.5, 7.0, 3.0]
    ratio = Ratio.of(busy, [1.01 * second for second in busy])
    assert ratio.median == pytest.approx(1.01)
    assert ratio.low == pytest.approx(1.01)
    assert ratio.high == pytest.approx(1.01)


def test_a_ratio_above_one_is_faster() -> None:
    ratio = Ratio.of([1.0, 1.0, 1.0], [2.0, 3.0, 2.5])
    assert (ratio.median, ratio.best) == (2.5, 2.0)


def test_the_uncertainty_is_a_share_of_the_ratio() -> None:
    """What is ten times as fast is known as well as what is ten times as slow."""
    times = [1.0, 1.1, 1.2, 1.3, 1.4]
    fast, slow = Ratio.of([0.1] * 5, times), Ratio.of([10.0] * 5, times)
    assert fast.uncertainty == pytest.approx(slow.uncertainty)
    assert fast.uncertainty == pytest.approx((fast.high - fast.low) / 2 / fast.median)


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=60))
def test_the_interval_holds_the_median(pairs: list[tuple[float, float]]) -> None:
    own, peer = zip(*pairs, strict=True)
    ratio = Ratio.of(own, peer)
    assert ratio.low <= ratio.median <= ratio.high
    assert ratio.median == pytest.approx(statistics.median(p / o for o, p in pairs))


def test_the_interval_of_many_pairs_is_that_of_ranks() -> None:
    pairs = [float(value) for value in range(1, 101)]
    ratio = Ratio.of([1.0] * 100, pairs)
    assert (ratio.low, ratio.high) == (41.0, 60.0)  # ranks 50 -+ 1.96 * 5


def test_percentiles_are_nearest_ranks_and_unknown_where_runs_are_few() -> None:
    hundred = [float(value) for value in range(1, 101)]
    assert percentiles(hundred) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles(hundred[:10]) == {"p50": 5.0, "p90": 9.0, "p99": None}


@pytest.mark.parametrize("wrong", [{"seconds": 0}, {"least": 0}, {"warmup": 0}, {"precision": 0}, {"patience": 0.5}])
def test_a_plan_that_measures_nothing_is_an_error(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="Needed"):
        Rounds(**wrong)  # type: ignore[arg-type]
