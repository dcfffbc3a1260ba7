"""The papers' accuracies beside what each model costs: parameters, multiply-accumulates, and images per second."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike

import torch

from mixlab.core.errors import ConfigError, near_misses, require
from mixlab.evals.cost.speed import measure_speed
from mixlab.evals.cost.summary import count, summarize
from mixlab.findings.findings import Finding, read_finding
from mixlab.metrics.macs import macs_by_part
from mixlab.models.config import Reported
from mixlab.models.zoo import create_model, ensemble_row, list_models, model_config

# sequencer2d_s_vertical: the family, its size, and what is changed in it
NAME = re.compile(
    r"(?P<family>.+?)_(?:[sml]|[smb]\d+|pico|tiny|mini|small|medium|base|large)(?P<change>_.+)?", re.ASCII
)
BENCH = "mixlab bench"
FULL_PRECISION = ("float32", "tf32")  # TF32 is MetaFormer's (Table 12 and Figure 4)
Speeds = Mapping[tuple[str, int], float]  # images per second of a model at a side


@dataclass(frozen=True, kw_only=True)
class ReportedPoint:
    """A row of a paper's table with an accuracy, and what the model costs at the row's image size."""

    model: str
    family: str  # of models that differ in size alone
    changed: bool  # an ablation: it is not one of the family's sizes
    image_size: int
    pretraining: str | None
    top1: float
    params: int  # with those that are never trained
    macs: int
    images_per_second: float | None = None


def family_of(name: str) -> tuple[str, bool]:
    """'vil_tiny' -> ('vil', False), and ('sequencer2d', True) for 'sequencer2d_s_add', which is an ablation."""
    parts = NAME.fullmatch(name)
    return (name, False) if parts is None else (parts["family"], parts["change"] is not None)


def reported_of(name: str) -> tuple[Reported, ...]:
    return (ensemble_row(name) or model_config(name)).reported


def points_of(pattern: str = "*") -> list[ReportedPoint]:
    """Of all models that match, each row of their papers that has an accuracy; the costs are counted here."""
    names = list_models(pattern)
    if not names:
        raise ConfigError(f"No model matches {pattern!r}. {near_misses(pattern, list_models())}")
    rows = [(name, row) for name in names for row in reported_of(name) if row.top1 is not None]
    if not rows:
        raise ConfigError(
            f"No paper reports an accuracy for {', '.join(names)}: there is nothing to draw. "
            "Choose other models; `mixlab models` shows the papers' top-1."
        )
    costs = {key: costs_of(*key) for key in dict.fromkeys((name, row.image_size) for name, row in rows)}
    return [point_of(name, row, costs[name, row.image_size]) for name, row in rows]


def point_of(name: str, row: Reported, costs: tuple[int, int]) -> ReportedPoint:
    assert row.top1 is not None
    family, changed = family_of(name)
    params, macs = costs
    about = {"image_size": row.image_size, "pretraining": row.pretraining, "top1": row.top1}
    return ReportedPoint(model=name, family=family, changed=changed, params=params, macs=macs, **about)  # type: ignore[arg-type]


def costs_of(name: str, side: int) -> tuple[int, int]:
    """Parameters and multiply-accumulates of a model built for square images."""
    known = summarize(name)
    if known.image_size == (side, side):
        return known.params + known.frozen, known.macs
    with torch.device("meta"):
        model = create_model(name, image_size=side)
    params = count(model, trainable=True) + count(model, trainable=False)
    return params, sum(macs_by_part(model, (side, side)).values())


# -- throughput ----------------------------------------------------------------------------------


def measure_speeds(
    points: Sequence[ReportedPoint],
    *,
    batch: int = 1,
    seconds: float = 1.0,
    limit_seconds: float = 600.0,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[tuple[str, int], float]:
    """Images per second of every model at every size that is shown, with fresh weights on this CPU, small ones first.

    `seconds` go into each measurement. Once all together took `limit_seconds`, none is begun; `tell` hears of each.
    """
    require(limit_seconds > 0, f"a limit of more than 0 seconds; got {limit_seconds:g}.")
    order = sorted(points, key=lambda point: point.macs)
    wanted, start = list(dict.fromkeys((point.model, point.image_size) for point in order)), time.perf_counter()
    found: dict[tuple[str, int], float] = {}
    for name, side in wanted:
        if time.perf_counter() - start >= limit_seconds:
            tell(f"the limit of {limit_seconds:g} seconds is over: {len(wanted) - len(found)} are not measured")
            break
        model = create_model(name, image_size=side)
        speed = measure_speed(model, side, batch=batch, seconds=seconds, rounds=3).images_per_second
        found[name, side] = speed
        tell(f"{len(found)}/{len(wanted)} {name}, {side} px: {speed:.3g} images/s")
    return found


def with_speeds(points: Sequence[ReportedPoint], speeds: Speeds) -> list[ReportedPoint]:
    return [replace(point, images_per_second=speeds.get((point.model, point.image_size))) for point in points]


def read_speeds(path: str | PathLike[str], points: Sequence[ReportedPoint]) -> dict[tuple[str, int], float]:
    """What a bench.json says about the models and sizes shown: inference in float32 or TF32, the best batch."""
    found: Finding = read_finding(path)
    if found.kind != "bench":
        raise ConfigError(f"{path} is a finding of `mixlab {found.kind}`; needed is bench.json of `{BENCH}`.")
    shown, speeds = {(point.model, point.image_size) for point in points}, dict[tuple[str, int], float]()
    for row in found.data.get("rows", []):
        (height, width), speed = row["image_size"], row["images_per_second"]
        plainly = row["mode"] == "inference" and row["dtype"] in FULL_PRECISION and not row["compiled"]
        key = (row["model"], height)
        if plainly and speed is not None and height == width and key in shown:
            speeds[key] = max(speed, speeds.get(key, 0.0))
    if not speeds:
        sides = " ".join(str(side) for side in sorted({side for _, side in shown}))
        raise ConfigError(
            f"{path} measured none of the models that are shown. `{BENCH} MODEL... --sizes {sides} --out FOLDER` does."
        )
    return speeds
