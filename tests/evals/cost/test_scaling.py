import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixlab.evals.cost.scaling import exponent


@given(st.floats(0.2, 3.0), st.floats(0.01, 100))
def test_a_power_law_gives_its_exponent(power: float, factor: float) -> None:
    assert exponent({size: factor * size**power for size in (4, 16, 64, 256)}) == pytest.approx(power)


def test_only_the_upper_half_counts() -> None:
    costs = {1: 100.0, 2: 100.0, 4: 16.0, 8: 64.0, 16: 256.0}
    assert exponent(costs) == pytest.approx(2.0)


def test_too_little_is_unknown() -> None:
    assert exponent({}) is None
    assert exponent({4: 2.0, 8: None, 16: 0.0}) is None
    assert exponent({4: 2.0, 8: 4.0}) == pytest.approx(1.0)
