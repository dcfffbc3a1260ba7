"""Scores of one model on everything that was tried, the papers' summaries of them, and the table of several models."""

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mixlab.evals.quality.attacks import Attack
from mixlab.evals.quality.corruptions import SEVERITIES, alexnet_errors, short_name, standard
from mixlab.findings.findings import Cell

TITLES = {"a": "A", "r": "R", "sketch": "Sketch", "v2": "V2"}


@dataclass(frozen=True)
class Score:
    """How many images were told right."""

    right: int
    images: int

    @property
    def top1(self) -> float:
        return 100 * self.right / max(self.images, 1)

    @property
    def error(self) -> float:
        return 100 - self.top1

    def plain(self) -> dict[str, float]:
        return {"top1": self.top1, "right": self.right, "images": self.images}


@dataclass
class Result:
    """Everything that was measured of one model."""

    name: str
    clean: Score | None = None
    corruptions: dict[str, dict[int, Score]] = field(default_factory=dict)
    variants: dict[str, Score] = field(default_factory=dict)
    real: Score | None = None
    attacks: dict[Attack, Score] = field(default_factory=dict)
    of_imagenet_c: bool = True  # whether AlexNet's errors are the yardstick of these severities

    def mean_error(self, name: str) -> float:
        """In percent, over the severities that were measured."""
        return float(np.mean([score.error for score in self.corruptions[name].values()]))

    def corruption_error(self, name: str) -> float | None:
        """CE: the error over five severities as a share of AlexNet's, in percent."""
        known = alexnet_errors()
        whole = set(self.corruptions.get(name, ())) == set(SEVERITIES)
        return self.mean_error(name) / known[name] if self.of_imagenet_c and whole and name in known else None

    @property
    def error(self) -> float | None:
        """Mean corruption error without a yardstick, over the standard corruptions that were measured."""
        names = [name for name in self.corruptions if name in standard()] or list(self.corruptions)
        return float(np.mean([self.mean_error(name) for name in names])) if names else None

    @property
    def mce(self) -> float | None:
        """Mean CE of the 15 standard corruptions; nothing if one of them was not measured whole."""
        errors = [self.corruption_error(name) for name in standard()]
        return None if None in errors else float(np.mean(errors))  # type: ignore[arg-type]

    def plain(self) -> dict[str, Any]:
        return {
            "clean": None if self.clean is None else self.clean.plain(),
            "corruptions": {
                name: {str(severity): score.plain() for severity, score in row.items()}
                for name, row in self.corruptions.items()
            },
            "corruption_error": {name: self.corruption_error(name) for name in self.corruptions},
            "mean_error": self.error,
            "mce": self.mce,
            "variants": {name: score.plain() for name, score in self.variants.items()},
            "real": None if self.real is None else self.real.plain(),
            "attacks": [{**plain_attack(attack), **score.plain()} for attack, score in self.attacks.items()],
        }


def plain_attack(attack: Attack) -> dict[str, Any]:
    steps = {"steps": attack.steps, "step_size": attack.step} if attack.kind == "pgd" and attack.epsilon else {}
    return {"kind": attack.kind, "epsilon": attack.epsilon, **steps}


def tabulate(results: Sequence[Result], attacks: Collection[Attack]) -> tuple[list[str], list[list[Cell]]]:
    """Accuracies in percent; of corruptions the CE if all five severities of ImageNet-C were measured, or the error."""
    first = results[0]
    columns: dict[str, Callable[[Result], float | None]] = {}
    if first.clean is not None:
        columns["clean"] = lambda result: top1_of(result.clean)
    for kind in first.variants:
        columns[TITLES[kind]] = functools.partial(variant_top1, kind)
    if first.real is not None:
        columns["Real"] = lambda result: top1_of(result.real)
    if first.corruptions:
        columns["error"] = lambda result: result.error
    if first.mce is not None:
        columns["mCE"] = lambda result: result.mce
    for name in first.corruptions:
        if first.corruption_error(name) is not None:
            columns[f"{short_name(name)} CE"] = functools.partial(Result.corruption_error, name=name)
        else:
            columns[short_name(name)] = functools.partial(Result.mean_error, name=name)
    for attack in first.attacks:
        if attack.epsilon or any(not asked.epsilon for asked in attacks):
            columns[f"{attack.kind.upper()} {attack.epsilon:g}/255"] = functools.partial(attack_top1, attack)
    table: list[list[Cell]] = [[result.name, *(value(result) for value in columns.values())] for result in results]
    return ["model", *columns], table


def top1_of(score: Score | None) -> float | None:
    return None if score is None else score.top1


def variant_top1(kind: str, result: Result) -> float:
    return result.variants[kind].top1


def attack_top1(attack: Attack, result: Result) -> float:
    return result.attacks[attack].top1
