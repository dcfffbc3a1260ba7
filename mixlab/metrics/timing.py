"""The one clock of Mixlab: things run one call at a time in turn, and a ratio is taken pair by pair.

Timings of a shared machine are noisy: the best of several rounds is what the machine can do, and how far the slowest
lies from it says how much to believe.

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

Run = Callable[[], object]
Clock = Callable[[], float]
SIGMAS = 1.96  # of a normal distribution: 95%


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """When timing ends: after `seconds` and `least` rounds. A ratio that is not yet known to `precision` (half of its
    interval, as a share of it) gets up to `patience` times as long.
    """

    seconds: float = 2.0
    least: int = 10
    most: int = 5000
    warmup: int = 3
    precision: float = 0.02
    patience: float = 15.0

    @classmethod
    def exactly(cls, count: int) -> "Rounds":
        """Exactly so many rounds after one run of each as a warm-up, however long they take."""
        return cls(seconds=1e-9, least=count, most=count, warmup=1)

    def __post_init__(self) -> None:
        require(self.seconds > 0, f"seconds above 0; got {self.seconds}.")
        require(1 <= self.least <= self.most, f"rounds from 1 to {self.most}; got {self.least}.")
        require(self.warmup >= 1, f"a warm-up of 1 run or more; got {self.warmup}.")
        require(self.precision > 0 and self.patience >= 1, f"a precision above 0, a patience of 1 or more; got {self}.")


@dataclass(frozen=True)
class Timing:
    """Seconds of one run."""

    best: float
    median: float
    spread: float  # how much slower the slowest round was than the best, as a share of the best
    rounds: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Timing":
        best = min(seconds)
        return cls(best, statistics.median(seconds), max(seconds) / best - 1, len(seconds))

    def plain(self) -> dict[str, Any]:
        return asdict(self)


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


def take_turns(
    runs: Mapping[str, Run], schedule: Rounds, *, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Return the seconds of every run after the warm-up.

    Every other round goes backwards, so that no run always comes second.

    A run on an accelerator must wait for it before it returns. With two runs, they go on until their ratio is known.
    """
    require(bool(runs), "something to run; got nothing.")
    for run in runs.values():
        for _ in range(schedule.warmup):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    start, rounds = clock(), 0
    while not is_enough(list(seconds.values()), rounds, clock() - start, schedule):
        for name in list(runs)[:: 1 if rounds % 2 == 0 else -1]:
            began = clock()
            runs[name]()
            seconds[name].append(clock() - began)
        rounds += 1
    return seconds


def time_rounds(runs: Mapping[str, Run], rounds: int) -> dict[str, Timing]:
    """Return the timing of each of several runs that take turns for so many rounds."""
    require(bool(runs) and rounds >= 1, f"something to run and 1 round or more; got {list(runs)} and {rounds}.")
    return {name: Timing.of(seconds) for name, seconds in take_turns(runs, Rounds.exactly(rounds)).items()}


def is_enough(seconds: Sequence[Sequence[float]], rounds: int, elapsed: float, schedule: Rounds) -> bool:
    if rounds >= schedule.most:
        return True
    if rounds < schedule.least or elapsed < schedule.seconds:
        return False
    if len(seconds) != 2 or elapsed >= schedule.patience * schedule.seconds:
        return True
    return Ratio.of(*seconds).uncertainty <= schedule.precision


def percentiles(seconds: Sequence[float], shares: Sequence[int] = (50, 90, 99)) -> dict[str, float | None]:
    """Nearest-rank percentiles by name (p50, ...); None where so few runs cannot tell."""
    ordered = sorted(seconds)
    count = len(ordered)
    named: dict[str, Any] = {}
    for share in shares:
        rank = math.ceil(share / 100 * count)
        named[f"p{share}"] = ordered[rank - 1] if count * (100 - share) >= 100 else None
    return named


Plan, alternate = Rounds, time_rounds  # their names in release 0.1
