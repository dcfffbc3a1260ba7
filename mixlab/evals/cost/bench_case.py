"""One model under one setting: what is measured, and the row that it becomes."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from mixlab.core.errors import MacsError, MixlabError, require
from mixlab.evals.cost.compile_time import compile_time
from mixlab.evals.cost.execution import Execution, products_of
from mixlab.evals.cost.imagenet import IMAGENET
from mixlab.evals.cost.speed import MEBIBYTE, peak_memory_mb
from mixlab.evals.cost.whole_task import is_whole_task, whole_task
from mixlab.evals.subjects import open_subject
from mixlab.findings.results import describe_machine
from mixlab.metrics.macs import macs
from mixlab.metrics.timing import Ratio, Rounds, Run, Timing, percentiles, take_turns
from mixlab.models.backbone import Backbone

SKIPPABLE = ("memory", "compile_time")
LATENCY_RUNS = 100  # what the 99th percentile takes
LATENCY_TIME = 5.0  # how many times the plan's seconds they may take
EPOCHS = 10  # of ImageNet-1K, whose hours a training step tells (Vision-LSTM, Table 6)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model under one setting."""

    model: str
    image_size: tuple[int, int]
    batch: int
    execution: Execution


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What all cases of a bench have in common. `changes` are options of the models, though not of the peer."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    against: str | None = None
    device: torch.device = torch.device("cpu")
    plan: Rounds = Rounds()
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = sorted(set(self.skip) - set(SKIPPABLE))
        require(not unknown, f"measurements to skip among {', '.join(SKIPPABLE)}; got {unknown}.")


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """What a case costs; None where it was not measured, and then `reason` may say why.

    `images_per_second` and `best_ms` are of the best run, `spread` says how much slower the slowest was;
    `hours_10_epochs` are of ImageNet-1K at the speed of that run. Percentiles are the latency of one image. `ratio` is
    the median over pairs: how many times as fast as `against`.
    """

    model: str
    mode: str  # "inference" or "training"
    image_size: tuple[int, int]
    batch: int
    dtype: str
    layout: str
    compiled: bool
    optimizer: str
    device: str
    threads: int
    machine: str
    warmup: int  # runs
    gmacs: float | None = None  # billions of multiply-accumulates of one image; of Mixlab's models
    repeats: int = 0
    images_per_second: float | None = None
    best_ms: float | None = None
    median_ms: float | None = None
    spread: float | None = None
    hours_10_epochs: float | None = None  # of training steps; loading images and evaluation are not in it
    p50_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None
    peak_mb: float | None = None
    compile_cold_s: float | None = None
    compile_warm_s: float | None = None
    trivial_cold_s: float | None = None
    trivial_warm_s: float | None = None
    changes: str = ""  # options of the model that were changed, as KEY=VALUE
    against: str | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    ratio_best: float | None = None
    reason: str = ""

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "image_size": list(self.image_size)}


def measure_case(case: Case, conditions: Conditions) -> BenchRow:
    """The costs of one case. Memory comes first, in a process of its own: what does not fit dies there, not here."""
    case.execution.check(conditions.device)
    with products_of(case.execution.dtype, conditions.device):
        return measure_checked(case, conditions)


def measure_checked(case: Case, conditions: Conditions) -> BenchRow:
    peak = peak_of(case, conditions)
    own = open_model(case.model, case, conditions.device, conditions.changes)
    found: dict[str, Any] = {"gmacs": gmacs_of(own[0], case.image_size)}
    runs = {"own": ready(*own, case)}
    if conditions.device.type == "cuda" and "memory" not in conditions.skip:  # before the peer is there
        peak = cuda_peak(runs["own"], conditions.device)
    if conditions.against is not None:
        runs["peer"] = ready(*open_model(conditions.against, case, conditions.device), case)
    seconds = take_turns(runs, plan_for(case, runs["own"], conditions.plan))
    found |= {**timing_of(seconds["own"], case), "peak_mb": peak, **compiling(case, conditions)}
    if conditions.against is not None:
        ratio = Ratio.of(seconds["own"], seconds["peer"])
        found |= {"ratio": ratio.median, "ratio_low": ratio.low, "ratio_high": ratio.high, "ratio_best": ratio.best}
    return row_of(case, conditions, **found)


def row_of(case: Case, conditions: Conditions, **found: Any) -> BenchRow:
    how = case.execution
    return BenchRow(
        model=case.model,
        mode="training" if how.training else "inference",
        image_size=case.image_size,
        batch=case.batch,
        **{name: getattr(how, name) for name in ("dtype", "layout", "compiled", "optimizer")},
        device=str(conditions.device),
        threads=torch.get_num_threads(),
        machine=machine_line(),
        warmup=conditions.plan.warmup,
        changes=" ".join(f"{key}={shown(value)}" for key, value in conditions.changes.items()),
        against=conditions.against,
        **found,
    )


def shown(value: object) -> str:
    """A value of an option in one word or in JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def gmacs_of(model: nn.Module, image_size: tuple[int, int]) -> float | None:
    if not any(isinstance(part, Backbone) for part in model.modules()):
        return None
    try:
        return macs(model, image_size) / 1e9
    except MacsError:  # an operator of somebody's own mixer
        return None


def machine_line() -> str:
    about = describe_machine()
    return f"{about['processor']}, {about['cores']} cores, PyTorch {about['PyTorch']}"


def open_model(
    name: str, case: Case, device: torch.device, changes: Mapping[str, Any] | None = None
) -> tuple[nn.Module, int | None]:
    """A model, and the channels of its images unless it holds a backbone that knows them."""
    if not is_whole_task(name):
        subject = open_subject(name, image_size=case.image_size, changes=changes).to(device)
        return subject.model, subject.in_channels
    require(not case.execution.training, f"inference for {name!r}: a training step of it needs objects.")
    return whole_task(name, case.image_size, changes).to(device), None


def ready(model: nn.Module, in_channels: int | None, case: Case) -> Run:
    """One run of a model as the case says."""
    prepared = case.execution.prepare(model)
    images = case.execution.images(prepared, case.batch, case.image_size, in_channels)
    return case.execution.runner(prepared, images)


def plan_for(case: Case, run: Run, plan: Rounds) -> Rounds:
    """Latency percentiles take more runs than a mean, as long as they do not take too long."""
    if case.batch != 1 or case.execution.training:
        return plan
    run()
    start = time.perf_counter()
    run()
    affordable = LATENCY_RUNS * (time.perf_counter() - start) <= LATENCY_TIME * plan.seconds
    least = min(max(plan.least, LATENCY_RUNS), plan.most) if affordable else plan.least
    return Rounds(**{**asdict(plan), "least": least})


def timing_of(seconds: Sequence[float], case: Case) -> dict[str, Any]:
    timing = Timing.of(seconds)
    found: dict[str, Any] = {
        "repeats": timing.rounds,
        "images_per_second": case.batch / timing.best,
        "best_ms": 1e3 * timing.best,
        "median_ms": 1e3 * timing.median,
        "spread": timing.spread,
    }
    if case.execution.training:
        found["hours_10_epochs"] = EPOCHS * IMAGENET * timing.best / case.batch / 3600
    elif case.batch == 1:
        shares = percentiles(seconds).items()
        found |= {f"{name}_ms": None if value is None else 1e3 * value for name, value in shares}
    return found


def peak_of(case: Case, conditions: Conditions) -> float | None:
    """Mebibytes on a CPU; an error if that, and as much for a peer, is not free. Compiled code is not asked."""
    from mixlab.training.fits import free_bytes

    if conditions.device.type != "cpu" or case.execution.compiled or "memory" in conditions.skip:
        return None
    how: dict[str, Any] = {"batch": case.batch, "execution": asdict(case.execution), "overrides": conditions.changes}
    peak = peak_memory_mb(case.model, case.image_size, **how)
    free, copies = free_bytes(conditions.device), 1 if conditions.against is None else 2
    if free is not None and copies * peak > free / MEBIBYTE:
        beside = "" if copies == 1 else " and the peer about as much"
        raise MixlabError(f"It needs {peak:.0f} MB{beside}, but only {free / MEBIBYTE:.0f} MB are free.")
    return peak


def cuda_peak(run: Run, device: torch.device) -> float:
    run()  # makes the state of an optimizer
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device) / MEBIBYTE


def compiling(case: Case, conditions: Conditions) -> dict[str, float]:
    """Compile times of a case that is compiled, unless they are skipped."""
    if not case.execution.compiled or "compile_time" in conditions.skip or conditions.device.type != "cpu":
        return {}
    how: dict[str, Any] = {"batch": case.batch, "execution": case.execution, "changes": conditions.changes}
    found = compile_time(case.model, case.image_size, **how)
    trivial = {"trivial_cold_s": found.trivial_cold, "trivial_warm_s": found.trivial_warm}
    return {"compile_cold_s": found.cold, "compile_warm_s": found.warm, **trivial}
