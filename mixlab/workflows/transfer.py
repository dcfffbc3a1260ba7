"""The VTAB-1K protocol (Vision-LSTM, B.4): a learning rate from the validation split, then the mean over seeds."""

import json
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from mixlab.core.errors import ConfigError, DataError, StoppedEarly
from mixlab.core.files import write_whole
from mixlab.data.open import SPLITS, open_data, splits
from mixlab.data.vtab import TASKS, expand, task_name
from mixlab.training.recipe import Recipe, load_recipe
from mixlab.training.run import RunResult, continued, require_same_run, run_config

TRANSFER, SUMMARY = "transfer.json", "summary.json"
GO_ON = "The same command goes on where it was."


@dataclass(frozen=True)
class TransferResult:
    """One dataset: what each learning rate reached on val, and what the best reaches on test."""

    data: str
    lr: float
    val: dict[str, float]  # mean top-1 on val by learning rate
    test: tuple[float, ...]  # top-1 of each seed
    mean: float


@dataclass(frozen=True)
class Summary:
    """A model on several datasets: what Tables 3 and 8 of Vision-LSTM print."""

    model: str
    results: tuple[TransferResult, ...]

    @property
    def averages(self) -> dict[str, float]:
        return averages(self.results)

    @property
    def missing(self) -> dict[str, list[str]]:
        return missing_tasks([result.data for result in self.results])


def transfer_all(
    model: str,
    datasets: Sequence[str | PathLike[str]],
    *,
    out: str | PathLike[str],
    progress: bool = True,
    **words: Any,
) -> Summary:
    """`transfer` a model to several datasets, each into its folder of `out`; "vtab:PATH" names all tasks below PATH.

    Data and recipe are checked before anything trains; `summary.json` is written after every dataset.
    """
    expanded = expand(datasets)
    counts = Counter(folder_name(data) for data in expanded)
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated or not expanded:
        told = f"more than one would write into {', '.join(repeated)}" if repeated else "there are none"
        raise ConfigError(f"A transfer needs datasets with different names; {told}.")
    sweep_recipe(model, words)
    for data in expanded:
        check_splits(data)
    console = Console(stderr=True, quiet=not progress)
    if missing_tasks(expanded):
        console.print(describe_missing(expanded), highlight=False, soft_wrap=True)
    results: list[TransferResult] = []
    for data in expanded:
        try:
            results.append(transfer(model, data, out=Path(out) / folder_name(data), progress=progress, **words))
        except StoppedEarly as stopped:
            done = f"{len(results)} of {len(expanded)} datasets are finished"
            raise StoppedEarly(f"Stopped; {done}. {GO_ON}") from stopped
        summary = Summary(model, tuple(results))
        row = {"model": model, "averages": summary.averages, "missing": summary.missing}
        write_whole(Path(out) / SUMMARY, json.dumps(row | {"results": list(map(asdict, results))}, indent=1))
        line = f"{data}: test top-1 {results[-1].mean:.2f}% with a learning rate of {results[-1].lr:g}"
        console.print(f"{line} ({len(results)} of {len(expanded)} datasets)", highlight=False, soft_wrap=True)
    return summary


def transfer(
    model: str,
    data: str | PathLike[str],
    *,
    out: str | PathLike[str],
    weights: str | None = None,
    recipe: str | PathLike[str] = "vision_lstm_vtab",
    changes: Mapping[str, Any] | None = None,
    keep: Literal["all", "final", "results"] = "final",
    progress: bool = True,
    **settings: Any,
) -> TransferResult:
    """Train every learning rate of the recipe's sweep with every seed, judge it on val, and test the best.

    The tested runs learn from train and val together. Finished runs count as they are, so the same call goes on after
    an interruption. A run of the sweep leaves no weights behind; `keep` says what a tested run leaves.
    """
    resolved = sweep_recipe(model, {"recipe": recipe, "changes": changes})
    if "train_splits" in settings:
        raise ConfigError("A transfer trains on train, then on train and val, so train_splits cannot be chosen.")
    check_splits(data)
    folder = Path(out)

    def run(lr: float, seed: int, parts: tuple[str, ...]) -> RunResult:
        place = folder / "-".join(parts) / f"lr{lr:g}" / f"seed{seed}"
        own = {**(changes or {}), "optimizer.lr": lr}
        options = {"weights": weights, "seed": seed, "train_splits": parts, **settings}
        options["keep"] = keep if "val" in parts else "results"
        config = run_config(model, data, recipe=recipe, changes=own, **options)
        require_same_run(config, place)
        done = continued(config, place, progress=progress)
        if done.stopped:
            raise StoppedEarly(f"Stopped. {GO_ON}")
        return done

    return sweep(resolved, str(data), folder, run)


def sweep_recipe(model: str, words: Mapping[str, Any]) -> Recipe:
    recipe = load_recipe(words.get("recipe", "vision_lstm_vtab"), model=model, changes=words.get("changes"))
    if recipe.sweep is None:
        raise ConfigError(f"Recipe {recipe.name!r} has no sweep of learning rates: use vision_lstm_vtab, or add one.")
    return recipe


def check_splits(data: str | PathLike[str]) -> None:
    """Raise unless the data has the three splits that the protocol needs, and all can be opened."""
    missing = set(SPLITS) - set(splits(data))
    if missing:
        raise DataError(f"A transfer needs train, val and test splits; {data} has no {', '.join(sorted(missing))}.")
    for split in SPLITS:
        open_data(data, split)


def sweep(
    recipe: Recipe, data: str, folder: Path, run: Callable[[float, int, tuple[str, ...]], RunResult]
) -> TransferResult:
    assert recipe.sweep is not None
    seeds = range(recipe.sweep.seeds)
    val = {lr: statistics.fmean(last_top1(run(lr, seed, ("train",))) for seed in seeds) for lr in recipe.sweep.lr}
    best = max(val, key=lambda lr: val[lr])
    finals = [run(best, seed, ("train", "val")) for seed in seeds]
    test = tuple((final.test or final.history[-1])["top1"] for final in finals)
    result = TransferResult(data, best, {f"{lr:g}": value for lr, value in val.items()}, test, statistics.fmean(test))
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / TRANSFER, json.dumps(asdict(result), indent=1))
    return result


def last_top1(run: RunResult) -> float:
    return run.history[-1]["top1"]


def folder_name(data: str | PathLike[str]) -> str:
    """The name of a dataset, or its path, as the name of one folder."""
    name, _, place = str(data).partition(":")
    path = name + place if len(name) == 1 else name  # a single letter is a drive of Windows
    return path.replace("/", "-").replace("\\", "-")


# -- averages --------------------------------------------------------------------------------------


def averages(results: Sequence[TransferResult]) -> dict[str, float]:
    """The mean accuracy over the tasks of each category of VTAB-1K, and as "average" over all 19 tasks (Table 3).

    A mean is there only if none of its tasks is missing. Without any task of VTAB-1K, "average" is over all datasets.
    """
    by_task = {task: result.mean for result in results if (task := task_name(result.data)) is not None}
    if not by_task:
        return {"average": statistics.fmean(result.mean for result in results)}
    groups = {category: tasks_of(category) for category in categories()} | {"average": list(TASKS)}
    return {
        name: statistics.fmean(by_task[task] for task in tasks)
        for name, tasks in groups.items()
        if set(tasks) <= by_task.keys()
    }


def missing_tasks(datasets: Sequence[str | PathLike[str]]) -> dict[str, list[str]]:
    """The tasks of VTAB-1K by category that are not among the datasets; nothing if no dataset is of VTAB-1K."""
    held = {task_name(data) for data in datasets} - {None}
    missing = {category: [task for task in tasks_of(category) if task not in held] for category in categories()}
    return {category: tasks for category, tasks in missing.items() if tasks} if held else {}


def describe_missing(datasets: Sequence[str | PathLike[str]]) -> str:
    """How many tasks of VTAB-1K there are and which are not, for a list that has some of them."""
    missing = missing_tasks(datasets)
    count = len(TASKS) - sum(map(len, missing.values()))
    told = "; ".join(f"{category}: {', '.join(tasks)}" for category, tasks in missing.items())
    return f"{count} of {len(TASKS)} tasks of VTAB-1K, so there is no average. Missing: {told}."


def average_row(summary: Summary) -> tuple[list[str], list[str]]:
    """A row of Table 3 with its header; an incomplete mean is replaced by how many of its tasks there are."""
    found, missing = summary.averages, summary.missing
    sizes = {category: len(tasks_of(category)) for category in categories()} | {"average": len(TASKS)}
    lacking = {category: len(tasks) for category, tasks in missing.items()}
    lacking["average"] = sum(lacking.values())
    cells = [
        f"{found[name]:.2f}" if name in found else f"{sizes[name] - lacking[name]} of {sizes[name]}" for name in sizes
    ]
    return ["model", *sizes], [summary.model, *cells]


def categories() -> list[str]:
    return list(dict.fromkeys(task.category for task in TASKS.values()))


def tasks_of(category: str) -> list[str]:
    return [name for name, task in TASKS.items() if task.category == category]
