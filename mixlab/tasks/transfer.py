"""The VTAB-1K protocol (Vision-LSTM, B.4): a learning rate from the validation split, then the mean over seeds."""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from mixlab.data.open import splits
from mixlab.data.vtab import TASKS
from mixlab.errors import ConfigError, DataError, StoppedEarly
from mixlab.files import write_whole
from mixlab.training.recipe import Recipe, load_recipe
from mixlab.training.run import RunResult, continued, require_same_run, run_config

TRANSFER = "transfer.json"


@dataclass(frozen=True)
class TransferResult:
    """One dataset: what each learning rate reached on val, and what the best reaches on test."""

    data: str
    lr: float
    val: dict[str, float]  # mean top-1 on val by learning rate
    test: tuple[float, ...]  # top-1 of each seed
    mean: float


def transfer(
    model: str,
    data: str | PathLike[str],
    *,
    out: str | PathLike[str],
    weights: str | None = None,
    recipe: str | PathLike[str] = "vision_lstm_vtab",
    changes: Mapping[str, Any] | None = None,
    progress: bool = True,
    **settings: Any,
) -> TransferResult:
    """Every learning rate of the recipe's sweep with every seed on train, judged on val; the best on train and val.

    Runs that are finished are kept, so the same call goes on after an interruption.
    """
    resolved = load_recipe(recipe, model=model, changes=changes)
    if resolved.sweep is None:
        raise ConfigError(f"Recipe {resolved.name!r} has no sweep of learning rates: use vision_lstm_vtab, or add one.")
    missing = {"train", "val", "test"} - set(splits(data))
    if missing:
        raise DataError(f"A transfer needs train, val and test splits; {data} has no {', '.join(sorted(missing))}.")
    folder = Path(out)

    def run(lr: float, seed: int, parts: tuple[str, ...]) -> RunResult:
        place = folder / "-".join(parts) / f"lr{lr:g}" / f"seed{seed}"
        own = {**(changes or {}), "optimiser.lr": lr}
        options = {"weights": weights, "seed": seed, "train_splits": parts, **settings}
        config = run_config(model, data, recipe=recipe, changes=own, **options)
        require_same_run(config, place)
        done = continued(config, place, progress=progress)
        if done.stopped:
            raise StoppedEarly("Stopped. The same command goes on where it was.")
        return done

    return sweep(resolved, str(data), folder, run)


def sweep(
    recipe: Recipe, data: str, folder: Path, run: Callable[[float, int, tuple[str, ...]], RunResult]
) -> TransferResult:
    assert recipe.sweep is not None
    seeds = range(recipe.sweep.seeds)
    val = {lr: statistics.fmean(last_top1(run(lr, seed, ("train",))) for seed in seeds) for lr in recipe.sweep.lr}
    best = max(val, key=lambda lr: val[lr])
    finals = [run(best, seed, ("train", "val")) for seed in seeds]
    test = tuple(final.test["top1"] for final in finals if final.test is not None)
    result = TransferResult(data, best, {f"{lr:g}": value for lr, value in val.items()}, test, statistics.fmean(test))
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / TRANSFER, json.dumps(asdict(result), indent=1))
    return result


def last_top1(run: RunResult) -> float:
    return run.history[-1]["top1"]


def averages(results: Sequence[TransferResult]) -> dict[str, float]:
    """The Natural, Specialized and Structured means of Tables 3 and 8, and the mean of all datasets."""
    by_task = {result.data.removeprefix("vtab/").split(":")[0]: result.mean for result in results}
    found: dict[str, float] = {}
    for category in dict.fromkeys(task.category for task in TASKS.values()):
        values = [by_task[task] for task, own in TASKS.items() if own.category == category and task in by_task]
        if values:
            found[category] = statistics.fmean(values)
    return {**found, "average": statistics.fmean(by_task.values())}
