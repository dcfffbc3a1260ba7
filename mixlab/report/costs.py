"""The costs a model is judged by, and numbers as people read them."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from mixlab.findings.results import Budget, ModelResult


@dataclass(frozen=True)
class CostColumn:
    name: str
    label: str
    limit: Callable[[Budget], float | None]
    of: Callable[[ModelResult], float | None]
    show: Callable[[float], str]


def show_count(value: float) -> str:
    """1_234_567 as 1.23 M."""
    for size, unit in ((1e18, " E"), (1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{three_digits(value / size)}{unit}"
    return f"{value:.0f}"


def three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def short(text: str) -> str:
    """9.00 ms as 9 ms, for numbers that are round by choice: limits and ticks."""
    return re.sub(r"(?<=\d)\.?0+(?= |$)", "", text) if "." in text else text


def show_ms(value: float) -> str:
    return f"{three_digits(value)} ms"


def show_mb(value: float) -> str:
    return f"{three_digits(value)} MB"


def show_time(seconds: float) -> str:
    if seconds < 60:
        return f"{three_digits(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


COSTS = {
    cost.name: cost
    for cost in (
        CostColumn("latency_ms", "latency", lambda budget: budget.max_ms, lambda model: model.latency_ms, show_ms),
        CostColumn("peak_mb", "peak memory", lambda budget: budget.max_mb, lambda model: model.peak_mb, show_mb),
        CostColumn(
            "params",
            "parameters",
            lambda budget: budget.max_params,
            lambda model: model.params + model.frozen,
            show_count,
        ),
        CostColumn("macs", "MACs", lambda budget: budget.max_macs, lambda model: model.macs, show_count),
    )
}
