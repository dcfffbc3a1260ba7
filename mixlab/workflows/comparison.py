"""Which mixer for my data: the same recipe, data, epochs and seeds for a list of models, side by side."""

import itertools
import shlex
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from mixlab.core.errors import ConfigError, DataError, StoppedEarly, TrainingError, require
from mixlab.core.processes import environment
from mixlab.data.open import open_data, splits
from mixlab.evals.cost.run_compute import flops_of_run
from mixlab.evals.cost.speed import latency_ms, measure_speed, peak_memory_mb
from mixlab.evals.cost.summary import count, summarize
from mixlab.metrics.macs import macs
from mixlab.models.config import ModelConfig
from mixlab.models.model import Model
from mixlab.models.weights import read_about
from mixlab.models.zoo import list_models
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
from mixlab.training.run import (
    FINAL,
    RESULT,
    RunConfig,
    RunResult,
    continued,
    read_config,
    require_same_run,
    run_config,
)
from mixlab.training.watch import ProgressBar
from mixlab.workflows.side_by_side import run_side_by_side

RESULTS, PAGE, TABLE = "comparison.json", "comparison.html", "comparison.csv"
SPEED_BATCH = 32
GO_ON = "Stopped. The same command goes on where it was. "


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
    require(settings.get("keep", "all") != "results", "weights to measure: keep = 'all' or 'final'.")
    require(jobs >= 1 and seeds >= 1, f"jobs and seeds of 1 or more; got {jobs} and {seeds}.")
    images = check_before(names, data, recipe, changes, folder)
    wanted = {
        name: [
            (
                run_config(name, data, recipe=recipe, changes=changes, seed=seed, **settings),
                folder / name / f"seed{seed}",
            )
            for seed in range(seeds)
        ]
        for name in names
    }
    for config, place in itertools.chain(*wanted.values()):
        require_same_run(config, place)
    folder.mkdir(parents=True, exist_ok=True)
    if jobs > 1:
        train_side_by_side(list(itertools.chain(*wanted.values())), jobs=jobs, progress=progress)
    results, memory = [], PeakMemory(folder, jobs)
    for name in names:
        runs = []
        for config, place in wanted[name]:
            runs.append(continued(config, place, progress=progress))
            if runs[-1].stopped:
                raise StoppedEarly(GO_ON + command())
        results.append(model_result(runs, memory if measure else None, names))
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
        task = load_recipe(recipe, model=name, changes=changes).task
        require(task == "classification", f"a recipe for classification; {recipe!s} is for {task}.")
    if environment()[1] > 1:
        raise TrainingError("A comparison runs in one process: start it without torchrun, with --jobs for more runs.")
    if folder.exists() and not folder.is_dir():
        raise TrainingError(f"{folder} is a file; --out must be a folder.")
    open_data(data, "train")
    held = splits(data)
    if not {"val", "test"} & set(held):
        raise DataError(f"{data} has no val or test split to compare models on; it has {', '.join(held)}.")
    return len(open_data(data, "test" if "test" in held and "val" in held else "val" if "val" in held else "test"))


# -- several runs at a time ----------------------------------------------------------------------


def train_side_by_side(wanted: Sequence[tuple[RunConfig, Path]], *, jobs: int, progress: bool) -> None:
    """The longest first, so that none is left to run alone at the end."""
    waiting = [(config, place) for config, place in wanted if not (place / RESULT).exists()]
    waiting.sort(key=lambda run: -summarize(run[0].model).macs)
    works = {str(place): partial(run_quietly, config, place, progress=progress) for config, place in waiting}
    failed, stopped = run_side_by_side(works, jobs=jobs)
    if failed:
        told = "; ".join(f"{place}: {why}" for place, why in failed.items())
        raise TrainingError(f"{told}. The other runs are kept; the same command goes on. {command()}")
    if stopped:
        raise StoppedEarly(GO_ON + command())


def run_quietly(config: RunConfig, place: Path, *, progress: bool) -> bool:
    """Whether the run was stopped before its end."""
    watchers = [ProgressBar(f"{config.model} on {config.data}", bar=False)] if progress else []
    return continued(config, place, callbacks=watchers, progress=False).stopped


# -- results -------------------------------------------------------------------------------------


class PeakMemory:
    """Peaks of finished models, each measured in a process of its own, `jobs` at a time."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self.folder, self.jobs = folder, jobs
        self.known: dict[str, float] = {}

    def of(self, name: str, names: Sequence[str]) -> float:
        files = {one: self.folder / one / "seed0" / FINAL for one in names}
        waiting = [one for one in names if one not in self.known and files[one].exists()]
        if name not in self.known:
            with ThreadPoolExecutor(self.jobs) as pool:
                self.known |= dict(zip(waiting, pool.map(lambda one: self.measure(files[one]), waiting), strict=True))
        return self.known[name]

    def measure(self, file: Path) -> float:
        height, width = read_about(file).configs[0].image_size
        return peak_memory_mb(file, (height, width))


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
        costs["peak_mb"] = memory.of(model.config.name, names)
    return ModelResult(
        name=model.config.name,
        params=count(model, trainable=True),
        frozen=count(model, trainable=False),
        macs=macs(model, size),
        top1=tuple(final["top1"] for final in finals),
        top5=tuple(final["top5"] for final in finals),
        curves=curves,
        train_seconds=sum(row["train_seconds"] for run in runs for row in run.history) / len(runs),
        train_flops=flops_of_run(read_config(runs[0].folder), configs_of(model), runs[0].train_images),
        **costs,
    )


def configs_of(model: Model) -> list[ModelConfig]:
    return [backbone.config for backbone in model.backbones]


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
