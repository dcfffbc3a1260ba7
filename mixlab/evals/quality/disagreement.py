"""Where models differ: errors that they do not have in common, and what they would be worth together."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor

from mixlab.core.errors import DataError, require
from mixlab.core.processes import choose_device
from mixlab.data.loader import Loader
from mixlab.data.open import AnyData, open_data
from mixlab.evals.quality.classes import open_for_classes
from mixlab.evals.subjects import Source, Subject, short_names
from mixlab.findings.findings import Cell, Finding, Picture, figure, finding
from mixlab.models.ensemble import Average, average_scores, check_average

COLUMNS = ("models", "top-1, %", "one is right, %", "errors not in common, %", "same wrong class, %")
Watch = Callable[[int, int], None]  # images more, of how many in all


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelAnswers:
    """What a model says about the images of a split."""

    scores: Tensor  # (N, classes), the model's logits
    right: Tensor  # (N,) booleans
    predicted: Tensor  # (N,) classes

    @classmethod
    def of(cls, scores: Tensor, truth: Tensor) -> "ModelAnswers":
        """Count as `mixlab eval` does: an answer is wrong if another class has the same score as the right one."""
        true_score = scores.gather(1, truth[:, None])
        right = (~(scores < true_score)).sum(1) == 1
        return cls(scores=scores, right=right, predicted=scores.argmax(1))


# -- numbers -------------------------------------------------------------------------------------


def errors_apart(first: Tensor, second: Tensor) -> float | None:
    """The share of images that only one of two models gets wrong among those that either gets wrong.

    Of which answers are right, (N,) booleans each. None if there is no error at all.
    """
    either = int((~(first & second)).sum())
    return int((first ^ second).sum()) / either if either else None


def same_wrong_class(first: ModelAnswers, second: ModelAnswers) -> float | None:
    """The share of the common errors where both name the same class; None if there is no common error."""
    both = ~first.right & ~second.right
    same = both & (first.predicted == second.predicted)
    return int(same.sum()) / int(both.sum()) if both.any() else None


def together(group: Sequence[ModelAnswers], truth: Tensor, average: Average = "logits") -> tuple[float, float]:
    """Return the top-1 of the models' ensemble, and the share of images that at least one model gets right."""
    mean = average_scores([one.scores for one in group], average)
    one_right = torch.stack([one.right for one in group]).any(0)
    return share(ModelAnswers.of(mean, truth).right), share(one_right)


def share(right: Tensor) -> float:
    return int(right.sum()) / len(right)


# -- the instrument ------------------------------------------------------------------------------


def disagreement(
    models: Sequence[Source],
    data: str | PathLike[str],
    *,
    split: Literal["train", "val", "test"] = "val",
    batch: int = 64,
    workers: int = 2,
    average: Average = "logits",
    device: str = "auto",
    seed: int = 0,
    watch: Watch | None = None,
) -> tuple[Finding, dict[str, Any]]:
    """Test each model alone, every pair and all of them on one split; every model sees its own preprocessing.

    `average` says what the ensembles of the table average, as in `mixlab.Ensemble`.
    """
    check_average(average)
    require(len(models) >= 2, f"two models or more; got {len(models)}.")
    source = open_data(data, split)
    subjects = [open_for_classes(model, source.class_names, str(data), seed=seed) for model in models]
    answers: list[ModelAnswers] = []
    truth = torch.empty(0)
    for subject in subjects:
        own = subject.to(choose_device(device, 0))
        found, said = answer(own, source, batch=batch, workers=workers, watch=partly(watch, len(models)))
        if answers and not torch.equal(truth, said):
            raise DataError(f"The images of {data} changed while they were read.")
        answers.append(found)
        truth = said
        own.to("cpu")
    names = short_names(subjects)
    pairs = {pair: pair_of(answers, pair) for pair in itertools.combinations(range(len(names)), 2)}
    found_all = finding(
        *(
            "disagree",
            "Errors that models do not have in common",
            COLUMNS,
            table_of(names, answers, truth, pairs, average),
        ),
        settings={
            **{"models": [one.name for one in subjects], "data": str(data), "split": split, "images": len(truth)},
            "average": average,
        },
        data={"pairs": [{"models": list(pair), **numbers} for pair, numbers in pairs.items()]},
        pictures=(Picture(name="disagree", caption="Errors that two models do not have in common, % of the errors."),),
    )
    return found_all, {"disagree": matrix(names, pairs)}


def partly(watch: Watch | None, models: int) -> Watch | None:
    return None if watch is None else lambda more, total: watch(more, total * models)


@torch.inference_mode()
def answer(
    subject: Subject, source: AnyData, *, batch: int, workers: int, watch: Watch | None = None
) -> tuple[ModelAnswers, Tensor]:
    """What a model says, and the truth, in the order of the images' numbers."""
    weight = next(subject.model.parameters())
    loader = Loader(source, subject.transform(), batch_size=batch, train=False, seed=0, workers=workers)
    scored, truth, places = [], [], []
    for found in loader.epoch(0):
        scores = subject.model(found.images.to(weight.device, weight.dtype))
        scored.append(scores.float().cpu())
        truth.append(found.labels)
        places.append(found.indices)
        if watch is not None:
            watch(len(found.labels), len(source))
    if not truth:
        raise DataError("None of the images could be read.")
    order = torch.cat(places).argsort()
    labelled = torch.cat(truth)[order]
    return ModelAnswers.of(torch.cat(scored)[order], labelled), labelled


def pair_of(answers: Sequence[ModelAnswers], pair: tuple[int, int]) -> dict[str, Any]:
    first, second = (answers[index] for index in pair)
    return {
        "errors_not_in_common": errors_apart(first.right, second.right),
        "same_wrong_class": same_wrong_class(first, second),
        "only_first_right": int((first.right & ~second.right).sum()),
        "only_second_right": int((~first.right & second.right).sum()),
        "both_right": int((first.right & second.right).sum()),
        "both_wrong": int((~first.right & ~second.right).sum()),
    }


def table_of(
    names: Sequence[str],
    answers: Sequence[ModelAnswers],
    truth: Tensor,
    pairs: dict[tuple[int, int], dict[str, Any]],
    average: Average,
) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    everyone = tuple(range(len(names)))
    groups = [*((index,) for index in everyone), *pairs, *([everyone] if len(names) > 2 else [])]
    for group in groups:
        top1, one_right = together([answers[index] for index in group], truth, average)
        numbers = pairs.get(group, {}) if len(group) == 2 else {}
        name = " + ".join(names[index] for index in group)
        apart, same = (percent(numbers.get(key)) for key in ("errors_not_in_common", "same_wrong_class"))
        rows.append([name if len(group) < 3 else f"all {len(names)}", 100 * top1, 100 * one_right, apart, same])
    return rows


def percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def matrix(names: Sequence[str], pairs: dict[tuple[int, int], dict[str, Any]]) -> Any:
    """Every model against every other; on the diagonal, a model has all errors in common with itself."""
    side = 0.62 * len(names)
    longest = 0.085 * max(len(name) for name in names)
    drawn = figure(max(3.4, 1.5 + side + longest), max(2.6, 1.0 + side + 0.7 * longest))
    axes = drawn.subplots()
    values = torch.full((len(names), len(names)), float("nan"))
    for (row, column), numbers in pairs.items():
        apart = percent(numbers["errors_not_in_common"])
        values[row, column] = values[column, row] = float("nan") if apart is None else apart
    image = axes.imshow(values.numpy(), cmap="viridis", vmin=0, vmax=100)
    for row, column in itertools.permutations(range(len(names)), 2):
        value = float(values[row, column])
        told, ink = ("-", "black") if value != value else (f"{value:.0f}", "white" if value < 60 else "black")
        axes.text(column, row, told, ha="center", va="center", color=ink, fontsize=9)
    ticks = range(len(names))
    axes.set_xticks(ticks, names, rotation=35, ha="right", rotation_mode="anchor", fontsize=8, parse_math=False)
    axes.set_yticks(ticks, names, fontsize=8, parse_math=False)
    bar = drawn.colorbar(image, ax=axes, shrink=0.9)
    bar.set_label("errors not in common, %", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return drawn
