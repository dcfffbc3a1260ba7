"""What models cost on this machine, over image sizes, batches and precisions, alone or beside a peer.

Every row records what it depends on. What cannot run is a row with the reason; Ctrl-C keeps the rows that are done.
"""

import gc
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import Any, TypeVar

import torch

from mixlab.core.errors import MixlabError, PrecisionError, require
from mixlab.evals.cost.bench_case import BenchRow, Case, Conditions, measure_case, row_of
from mixlab.evals.cost.bench_figures import throughput_bars
from mixlab.evals.cost.execution import Execution, check_dtype
from mixlab.evals.cost.whole_task import check_whole_task, is_whole_task
from mixlab.evals.subjects import open_subject
from mixlab.findings.findings import Cell, Finding, Picture, finding
from mixlab.findings.svg import need
from mixlab.metrics.timing import Rounds
from mixlab.models.config import parse_image_size
from mixlab.models.zoo import ensemble_row, list_models, model_config

Watch = Callable[[str], None]
REASON_LENGTH = 240
Job = TypeVar("Job")
Row = TypeVar("Row")


def run_all(
    jobs: Sequence[Job],
    measure: Callable[[Job], Row],
    failed: Callable[[Job, str], Row],
    *,
    name: Callable[[Job], str],
    watch: Watch | None = None,
) -> tuple[list[Row], bool]:
    """A row per job, and whether Ctrl-C ended it early. A job that cannot run has a row that says why."""
    rows: list[Row] = []
    try:
        for index, job in enumerate(jobs):
            if watch is not None:
                watch(f"{index + 1}/{len(jobs)} {name(job)}")
            try:
                rows.append(measure(job))
            except Exception as error:  # memory, operators without this dtype, compilers: whatever a model makes of it
                rows.append(failed(job, reason_of(error)))
            gc.collect()
    except KeyboardInterrupt:
        if not rows:
            raise
        return rows, True
    return rows, False


def run_cases(cases: Sequence[Case], conditions: Conditions, watch: Watch | None = None) -> tuple[list[BenchRow], bool]:
    def measure(case: Case) -> BenchRow:
        try:
            return measure_case(case, conditions)
        finally:
            if case.execution.compiled:
                torch._dynamo.reset()

    return run_all(
        cases,
        measure,
        lambda case, reason: row_of(case, conditions, reason=reason),
        name=describe,
        watch=watch,
    )


def describe(case: Case) -> str:
    how = case.execution
    words = ["training" if how.training else "inference", how.dtype, *(["compiled"] if how.compiled else [])]
    return f"{case.model} {case.image_size[0]}x{case.image_size[1]} batch {case.batch} {' '.join(words)}"


def reason_of(error: Exception) -> str:
    """An error in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if isinstance(error, MixlabError) else f"{type(error).__name__}: {text}"
    return text if len(text) <= REASON_LENGTH else text[: REASON_LENGTH - 3] + "..."


@contextmanager
def threads_set(count: int | None) -> Iterator[None]:
    """So many threads inside, as many as before behind."""
    before = torch.get_num_threads()
    require(count is None or count >= 1, f"1 thread or more; got {count}.")
    try:
        torch.set_num_threads(count or before)
        yield
    finally:
        torch.set_num_threads(before)


def cases_of(
    models: Sequence[str],
    sizes: Sequence[int | tuple[int, int]],
    batches: Sequence[int],
    executions: Sequence[Execution],
) -> list[Case]:
    """Every model under one setting, then the next setting."""
    require(bool(models and sizes and batches and executions), "at least one model, size, batch and dtype.")
    require(min(batches) >= 1, f"batches of 1 or more; got {list(batches)}.")
    settings = itertools.product(dict.fromkeys(map(parse_image_size, sizes)), dict.fromkeys(batches), executions)
    return [
        Case(model=model, image_size=size, batch=batch, execution=execution)
        for size, batch, execution in settings
        for model in models
    ]


def executions_of(
    dtypes: Sequence[str], *, training: bool, compiled: bool, layout: str, optimizer: str
) -> list[Execution]:
    """Inference, and a training step and compiled code beside it where asked for."""
    steps = [(False, "none"), *([(True, optimizer)] if training else [])]
    return [
        Execution(training=trains, dtype=dtype, layout=layout, compiled=compiles, optimizer=optimises)
        for dtype in dict.fromkeys(dtypes)
        for trains, optimises in steps
        for compiles in ([False, True] if compiled else [False])
    ]


def check_precisions(dtypes: Sequence[str], device: torch.device) -> None:
    """Make precisions safe before the first arithmetic, or it is too late."""
    for dtype in dtypes:
        try:
            check_dtype(dtype, device)
        except PrecisionError:
            continue  # its rows will say so


def check_model(model: str, changes: Mapping[str, Any] | None = None) -> None:
    """Raise for a model that nobody knows, and for changes that it cannot take."""
    changes = dict(changes or {})
    name = check_whole_task(model)[1] if is_whole_task(model) else model
    if name not in list_models():
        open_subject(name, changes=changes)
        return
    row = ensemble_row(name)
    for member in [name] if row is None else row.members:
        model_config(member, **changes)


def bench(
    models: Sequence[str],
    *,
    sizes: Sequence[int | tuple[int, int]] = (224,),
    batches: Sequence[int] = (1, 8),
    dtypes: Sequence[str] = ("float32",),
    training: bool = False,
    optimizer: str = "none",
    compiled: bool = False,
    layout: str = "contiguous",
    threads: int | None = None,
    changes: Mapping[str, Any] | None = None,
    against: str | None = None,
    device: str = "cpu",
    plan: Rounds | None = None,
    skip: Sequence[str] = (),
    watch: Watch | None = None,
) -> tuple[Finding, dict[str, Any]]:
    """Speed, latency, memory and compile time of models, and a picture of it.

    Models are texts that `open_subject` takes, or whole tasks such as upernet:vil_tiny and mask_rcnn:coat_lite_mini.

    `training` and `compiled` add rows beside plain inference. With `against`, every model takes turns with that peer.
    `changes` are options of `create_model` for all models; the peer stays as it is.
    After Ctrl-C the settings of the finding say `interrupted`.
    """
    need("matplotlib.figure")
    from mixlab.core.processes import choose_device

    executions = executions_of(dtypes, training=training, compiled=compiled, layout=layout, optimizer=optimizer)
    cases = cases_of(models, sizes, batches, executions)
    own: dict[str, Any] = {"changes": dict(changes or {}), "against": against, "skip": tuple(skip)}
    conditions = Conditions(device=choose_device(device, 0), plan=plan or Rounds(), **own)
    with threads_set(threads):
        check_precisions(dtypes, conditions.device)
        for model in models:
            check_model(model, changes)
        if against is not None:
            check_model(against)
        rows, interrupted = run_cases(cases, conditions, watch=watch)
        return report(rows, conditions, interrupted=interrupted)


# -- what was found ------------------------------------------------------------------------------


def report(rows: Sequence[BenchRow], conditions: Conditions, *, interrupted: bool) -> tuple[Finding, dict[str, Any]]:
    plain = [row.plain() for row in rows]
    figures = throughput_bars(plain)
    found = finding(
        "bench",
        f"Speed of {', '.join(dict.fromkeys(row.model for row in rows))}",
        [field.name for field in fields(BenchRow)],
        [cells(row) for row in rows],
        settings={
            "changes": dict(conditions.changes),
            "against": conditions.against,
            "interrupted": interrupted,
            "plan": asdict(conditions.plan),
        },
        data={"rows": plain},
        pictures=tuple(Picture(name=name, caption="images per second of the best run") for name in figures),
    )
    return found, figures


def cells(row: BenchRow) -> list[Cell]:
    height, width = row.image_size
    return list({**row.plain(), "image_size": str(height) if height == width else f"{height}x{width}"}.values())
