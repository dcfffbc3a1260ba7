"""Timing that holds on a busy machine: things run one call at a time in turn, and the ratio is taken pair by pair.

What else the machine does slows both halves of a pair. The median over many pairs is then the ratio, and how the pairs
scatter tells how far it can be trusted; the best of all runs moves more from one try to the next.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mixlab.core.errors import require
from mixlab.evals.cost.execution import Run

Clock = Callable[[], float]
SIGMAS = 1.96  # of a normal distribution: 95%


@dataclass(frozen=True, kw_only=True)
class Plan:
    """When timing ends: after `seconds` and `least` rounds. A ratio that is not yet known to `precision` (half of its
    interval, as a share of it) gets up to `patience` times as long.
    """

    seconds: float = 2.0
    least: int = 10
    most: int = 5000
    warmup: int = 3
    precision: float = 0.02
    patience: float = 15.0

    def __post_init__(self) -> None:
        require(self.seconds > 0, f"seconds above 0; got {self.seconds}.")
        require(1 <= self.least <= self.most, f"rounds from 1 to {self.most}; got {self.least}.")
        require(self.warmup >= 1, f"a warm-up of 1 run or more; got {self.warmup}.")
        require(self.precision > 0 and self.patience >= 1, f"a precision above 0, a patience of 1 or more; got {self}.")


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as the peer: above 1 is faster. `low` and `high` are the 95% interval of the median."""

    median: float
    low: float
    high: float
    best: float  # of the two best runs

    @classmethod
    def of(cls, own: Sequence[float], peer: Sequence[float]) -> "Ratio":
        """From the seconds of runs that took turns; ranks alone decide the interval, no distribution is assumed."""
        pairs = sorted(theirs / ours for ours, theirs in zip(own, peer, strict=True))
        count = len(pairs)
        rank = max(0, math.floor((count - SIGMAS * math.sqrt(count)) / 2))
        return cls(statistics.median(pairs), pairs[rank], pairs[count - 1 - rank], min(peer) / min(own))

    @property
    def uncertainty(self) -> float:
        """Half of the interval as a share of the ratio."""
        return (self.high - self.low) / 2 / self.median

    def plain(self) -> dict[str, float]:
        return asdict(self)


def take_turns(runs: Mapping[str, Run], plan: Plan, *, clock: Clock = time.perf_counter) -> dict[str, list[float]]:
    """Seconds of every run behind the warm-up. Every other round goes backwards, so that nobody always comes second.

    A run on an accelerator must wait for it before it returns. With two runs, they go on until their ratio is known.
    """
    require(bool(runs), "something to run; got nothing.")
    for run in runs.values():
        for _ in range(plan.warmup):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    start, rounds = clock(), 0
    while not is_enough(list(seconds.values()), rounds, clock() - start, plan):
        for name in list(runs)[:: 1 if rounds % 2 == 0 else -1]:
            began = clock()
            runs[name]()
            seconds[name].append(clock() - began)
        rounds += 1
    return seconds


def is_enough(seconds: Sequence[Sequence[float]], rounds: int, elapsed: float, plan: Plan) -> bool:
    if rounds >= plan.most:
        return True
    if rounds < plan.least or elapsed < plan.seconds:
        return False
    if len(seconds) != 2 or elapsed >= plan.patience * plan.seconds:
        return True
    return Ratio.of(*seconds).uncertainty <= plan.precision


def percentiles(seconds: Sequence[float], shares: Sequence[int] = (50, 90, 99)) -> dict[str, float | None]:
    """Nearest-rank percentiles by name (p50, ...); None where so few runs cannot tell."""
    ordered = sorted(seconds)
    count = len(ordered)
    told: dict[str, Any] = {}
    for share in shares:
        rank = math.ceil(share / 100 * count)
        told[f"p{share}"] = ordered[rank - 1] if count * (100 - share) >= 100 else None
    return told
