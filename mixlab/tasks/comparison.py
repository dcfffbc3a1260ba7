"""Which mixer for my data: the same recipe, data, epochs and seeds for a list of models, side by side."""

import multiprocessing
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mixlab.data.open import open_data, splits
from mixlab.errors import ConfigError, TrainingError, require
from mixlab.evals.macs import macs
from mixlab.evals.speed import latency_ms, measure_speed, peak_memory_mb
from mixlab.evals.summary import count, summarise
from mixlab.report import (
    Budget,
    Comparison,
    ModelResult,
    Point,
    describe_machine,
    read_comparison,
    write_comparison,
    write_csv,
    write_page,
)
from mixlab.training.recipe import flat, load_recipe
from mixlab.training.run import CONFIG, FINAL, RESULT, RunResult, resume, train
from mixlab.training.watch import ProgressBar
from mixlab.zoo import list_models

RESULTS, PAGE, TABLE = "comparison.json", "comparison.html", "comparison.csv"
SPEED_BATCH = 32
STOPPED = "Stopped. The same command goes on where it was: "


def compare(
    models: Sequence[str],
    data: str | PathLike[str],
    *,
    out: str | PathLike[str],
    recipe: str | PathLike[str] = "from_scratch_small",
    changes: Mapping[str, Any] | None = None,
    seeds: int = 1,
    budget: Budget | None = None,
    measure: bool = True,
    progress: bool = True,
    jobs: int = 1,
    **settings: Any,
) -> Comparison:
    """Train every model with every seed and write the table and the page. Runs that are there already are kept.

    `jobs` runs train at a time, each with its share of the threads: small models make better use of the cores so.
    """
    names = expand(models)
    folder = Path(out)
    images = check_before(names, data, recipe, changes, folder)
    require(jobs >= 1, f"jobs of 1 or more; got {jobs}.")
    folder.mkdir(parents=True, exist_ok=True)
    if jobs > 1:
        runs_wanted = [Run(name, seed, folder / name / f"seed{seed}") for name in names for seed in range(seeds)]
        train_side_by_side(runs_wanted, data, recipe, changes, jobs=jobs, progress=progress, settings=settings)
    results, measured_mb = [], PeakMemory(folder, jobs)
    for name in names:
        runs = []
        for seed in range(seeds):
            place = folder / name / f"seed{seed}"
            shown = progress and jobs == 1  # else it is finished by now
            runs.append(one_run(name, data, place, recipe, changes, progress=shown, seed=seed, **settings))
            if runs[-1].stopped:
                raise TrainingError(STOPPED + command())
        results.append(model_result(runs, measured_mb if measure else None, names))
        comparison = assemble(results, data, recipe, changes, seeds, runs[0], budget, images, jobs)
        write_comparison(comparison, folder / RESULTS)  # after every model, so that nothing is lost
    write_page(comparison, folder / PAGE)
    write_csv(comparison, folder / TABLE)
    return comparison


def expand(models: Sequence[str]) -> list[str]:
    """Names and shell patterns as names."""
    found: list[str] = []
    for pattern in models:
        names = list_models(pattern)
        if not names:
            raise ConfigError(f"No model matches {pattern!r}. `mixlab models` lists all.")
        found += [name for name in names if name not in found]
    return found


def check_before(
    names: Sequence[str], data: str | PathLike[str], recipe: Any, changes: Mapping[str, Any] | None, folder: Path
) -> int:
    """Everything that can be wrong with data and recipe, before the first model trains; the images that are tested."""
    for name in names:
        load_recipe(recipe, model=name, changes=changes)
    if folder.exists() and not folder.is_dir():
        raise TrainingError(f"{folder} is a file; --out must be a folder.")
    open_data(data, "train")
    held = splits(data)
    return len(open_data(data, "test" if "test" in held and "val" in held else "val" if "val" in held else "test"))


def one_run(
    name: str,
    data: Any,
    place: Path,
    recipe: Any,
    changes: Mapping[str, Any] | None,
    *,
    progress: bool,
    **settings: Any,
) -> RunResult:
    """A run from the start, or from where an earlier call was cut off."""
    if (place / CONFIG).exists():
        return resume(place, progress=progress)
    return train(name, data, out=place, recipe=recipe, changes=changes, progress=progress, **settings)


# -- several runs at a time ----------------------------------------------------------------------


class Run(NamedTuple):
    model: str
    seed: int
    place: Path


def train_side_by_side(
    runs: Sequence[Run],
    data: Any,
    recipe: Any,
    changes: Mapping[str, Any] | None,
    *,
    jobs: int,
    progress: bool,
    settings: Mapping[str, Any],
) -> None:
    """Every run in a process of its own, the longest first; one that fails leaves the others to finish."""
    threads = max(1, torch.get_num_threads() // jobs)
    spawned = multiprocessing.get_context("spawn")
    waiting = sorted((run for run in runs if not (run.place / RESULT).exists()), key=lambda run: -cost(run.model))
    failed: list[str] = []
    with ProcessPoolExecutor(jobs, spawned, initializer=prepare_worker, initargs=(threads,)) as pool:
        work = partial(train_quietly, data=data, recipe=recipe, changes=changes, progress=progress, settings=settings)
        futures = {pool.submit(work, run): run for run in waiting}
        try:
            for future in as_completed(futures):
                error = future.exception()
                if error is not None:
                    failed.append(f"{futures[future].model}: {error}")
                elif future.result():
                    raise KeyboardInterrupt
        except KeyboardInterrupt as interrupt:
            pool.shutdown(cancel_futures=True)
            raise TrainingError(STOPPED + command()) from interrupt
    if failed:
        raise TrainingError("; ".join(failed) + f". The other runs are kept; the same command goes on: {command()}")


def cost(model: str) -> int:
    """A guess at how long a model takes."""
    return summarise(model).macs


def prepare_worker(threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a run listens while it trains, and saves itself
    torch.set_num_threads(threads)


def train_quietly(
    run: Run, *, data: Any, recipe: Any, changes: Mapping[str, Any] | None, progress: bool, settings: Mapping[str, Any]
) -> bool:
    """Whether the run was stopped before its end."""
    watchers = [ProgressBar(f"{run.model} on {data}", bar=False)] if progress else []
    if (run.place / CONFIG).exists():
        return resume(run.place, callbacks=watchers, progress=False).stopped
    given = {"recipe": recipe, "changes": changes, "seed": run.seed, **settings}
    return train(run.model, data, out=run.place, callbacks=watchers, progress=False, **given).stopped


# -- results -------------------------------------------------------------------------------------


class PeakMemory:
    """Peaks of finished models, each measured in a process of its own, `jobs` at a time."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self.folder, self.jobs = folder, jobs
        self.known: dict[str, float] = {}

    def of(self, name: str, names: Sequence[str], size: tuple[int, int]) -> float:
        files = {one: self.folder / one / "seed0" / FINAL for one in names}
        waiting = [one for one in names if one not in self.known and files[one].exists()]
        if name not in self.known:
            with ThreadPoolExecutor(self.jobs) as pool:
                peaks = pool.map(lambda one: peak_memory_mb(files[one], size), waiting)
                self.known |= dict(zip(waiting, peaks, strict=True))
        return self.known[name]


def model_result(runs: Sequence[RunResult], memory: PeakMemory | None, names: Sequence[str]) -> ModelResult:
    """What a model reached and what it costs."""
    model = runs[0].model.eval()
    size = (model.config.image_size[0], model.config.image_size[1])
    finals = [run.test or run.history[-1] for run in runs]
    curves = tuple(
        tuple(Point(int(row["epoch"]), row["train_loss"], row["val_loss"], row["top1"]) for row in run.history)
        for run in runs
    )
    costs: dict[str, float] = {}
    if memory is not None:
        costs["images_per_second"] = measure_speed(model, size, batch=SPEED_BATCH).images_per_second
        costs["latency_ms"] = latency_ms(model, size)
        costs["peak_mb"] = memory.of(model.config.name, names, size)
    return ModelResult(
        name=model.config.name,
        params=count(model, trainable=True),
        frozen=count(model, trainable=False),
        macs=macs(model, size),
        top1=tuple(final["top1"] for final in finals),
        top5=tuple(final["top5"] for final in finals),
        curves=curves,
        train_seconds=sum(row["train_seconds"] for run in runs for row in run.history) / len(runs),
        **costs,
    )


def assemble(
    results: Sequence[ModelResult],
    data: Any,
    recipe: Any,
    changes: Mapping[str, Any] | None,
    seeds: int,
    run: RunResult,
    budget: Budget | None,
    images: int,
    jobs: int,
) -> Comparison:
    resolved = load_recipe(recipe, changes=changes)
    size = run.model.config.image_size
    return Comparison(
        title=f"{len(results)} models on {data}",
        data=str(data),
        recipe=resolved.name,
        image_size=(size[0], size[1]),
        epochs=int(run.history[-1]["epoch"]),
        seeds=tuple(range(seeds)),
        models=tuple(results),
        test_images=images,
        budget=budget or Budget(),
        command=command(),
        settings={key: str(value) for key, value in flat(resolved.plain()).items()}
        | {"images/s": f"batch {SPEED_BATCH}", "latency and memory": "batch 1", "trained at a time": str(jobs)},
        machine=describe_machine(),
    )


def command() -> str:
    return shlex.join(["mixlab", *sys.argv[1:]]) if sys.argv and sys.argv[0].endswith("mixlab") else ""


def decide(folder: str | PathLike[str], budget: Budget) -> Comparison:
    """A finished comparison under another budget; its page is written anew."""
    path = Path(folder)
    old = read_comparison(path / RESULTS)
    new = replace(old, budget=budget)
    write_page(new, path / PAGE)
    return new
