"""How a cost grows: the exponent of a power law."""

import math
from collections.abc import Mapping


def exponent(costs: Mapping[int, float | None]) -> float | None:
    """The slope of log cost against log size over the upper half of the sizes, where the largest term shows.

    Least squares. None for fewer than two sizes with a cost above 0.
    """
    known = sorted((size, cost) for size, cost in costs.items() if cost is not None and cost > 0)
    if len(known) < 2:
        return None
    upper = known[-max(2, (len(known) + 1) // 2) :]
    places = [(math.log(size), math.log(cost)) for size, cost in upper]
    middle = [sum(axis) / len(places) for axis in zip(*places, strict=True)]
    rise = sum((x - middle[0]) * (y - middle[1]) for x, y in places)
    return rise / sum((x - middle[0]) ** 2 for x, _ in places)
