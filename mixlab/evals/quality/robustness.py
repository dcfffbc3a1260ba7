"""How much of a classifier's accuracy is left on other images: corrupted, drawn, collected anew, or attacked.

One row per model, as in Sequencer's Tables 8 and 9: clean accuracy, the variants of ImageNet, mean error and mCE with
the error of each corruption, FGSM and PGD.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from mixlab.core.errors import ConfigError, DataError, near_misses
from mixlab.data.base import ImageData
from mixlab.data.open import AnyData, Spec, open_data
from mixlab.evals.inspect.gradients import captum
from mixlab.evals.quality.attacks import Attack
from mixlab.evals.quality.corruptions import MIN_SIDE, SEVERITIES, Corrupt, check_severities, choose, parameters
from mixlab.evals.quality.examine import Feeding, Look, Predictions, Watch, attacked, examine
from mixlab.evals.quality.robustness_figure import draw
from mixlab.evals.quality.scores import TITLES, Result, Score, plain_attack, tabulate
from mixlab.evals.quality.variants import VARIANTS, Variant, open_prepared, open_variant, read_real, real_labels
from mixlab.evals.subjects import Source, Subject, open_subject
from mixlab.findings.findings import Finding, Picture, finding
from mixlab.ops.corruptions import scipy

PAPERS = "imagenet"  # the set of severities that AlexNet's errors belong to


@dataclass(frozen=True, kw_only=True)
class Trials:
    """What is measured beside the clean accuracy. Severities of `corruptions` are made on the fly unless `prepared`."""

    corruptions: tuple[str, ...] = ("standard",)
    severities: tuple[int, ...] = SEVERITIES
    severity_set: str = PAPERS
    prepared: str | PathLike[str] | None = None  # an unpacked ImageNet-C
    variants: Mapping[str, str | PathLike[str]] = field(default_factory=dict)  # "a", "r", "sketch", "v2": folders
    real: str | PathLike[str] | None = None  # real.json, or "timm" for the copy that timm ships
    attacks: tuple[Attack, ...] = (Attack(kind="fgsm"), Attack(kind="pgd"))

    def __post_init__(self) -> None:
        object.__setattr__(self, "corruptions", choose(self.corruptions))
        object.__setattr__(self, "severities", check_severities(self.severities))
        for name in self.variants:
            if name not in VARIANTS:
                raise ConfigError(f"Unknown variant {name!r} of ImageNet. {near_misses(name, VARIANTS)}")
        parameters("fog", 1, self.severity_set)  # or an error


def robustness(
    models: Sequence[Source | Subject],
    data: Spec | None,
    *,
    split: str = "val",
    tests: Trials | None = None,
    feeding: Feeding | None = None,
    watch: Watch | None = None,
) -> tuple[Finding, dict[str, Any]]:
    """A finding with one row per model, and its figures.

    Without `data` only what brings its own images is measured: variants and a prepared ImageNet-C. Everything that may
    be wrong with models and data shows before the first image is judged. After Ctrl-C the settings of the finding say
    `interrupted`, and it holds what was whole by then.
    """
    tests, feeding = tests or Trials(), feeding or Feeding()
    subjects = [one if isinstance(one, Subject) else open_subject(one) for one in models]
    check(subjects, data, tests)
    check_sizes(subjects, data, tests, feeding)
    source = None if data is None else open_data(data, split)  # type: ignore[arg-type]
    work = plan(subjects, source, str(data), tests, feeding)
    results = [Result(subject.name, of_imagenet_c=of_imagenet_c(tests)) for subject in subjects]
    interrupted = not run_all(work, results, watch)
    if interrupted:
        keep_whole(results, tests.severities)
    return report(results, data, split, tests, feeding, interrupted=interrupted)


def run_all(work: Sequence["Work"], results: list[Result], watch: Watch | None) -> bool:
    """False if Ctrl-C ended it early, with some of the work done."""
    done = 0
    try:
        for done, (title, run) in enumerate(work):
            told = f"{title} ({done + 1} of {len(work)})"
            run(results, None if watch is None else functools.partial(watch, told))
    except KeyboardInterrupt:
        if not done:
            raise
        return False
    return True


def keep_whole(results: Sequence[Result], severities: Sequence[int]) -> None:
    """Without corruptions of which some severities were not measured: their means would be of something else."""
    for result in results:
        result.corruptions = {name: row for name, row in result.corruptions.items() if set(row) == set(severities)}


def of_imagenet_c(tests: Trials) -> bool:
    return tests.prepared is not None or tests.severity_set == PAPERS


def check(subjects: Sequence[Subject], data: Spec | None, tests: Trials) -> None:
    names = [subject.name for subject in subjects]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"Needed: one model or more, each once; got {', '.join(names) or 'none'}.")
    if data is None:
        made = tests.corruptions and tests.prepared is None
        wanting = [
            what for what, wanted in (("corruptions", made), ("attacks", tests.attacks), ("Real", tests.real)) if wanted
        ]
        if wanting:
            raise ConfigError(
                f"Without data there are no images for {' and '.join(wanting)}. Give a dataset, or turn them off."
            )
        if not tests.variants and tests.prepared is None:
            raise ConfigError("Nothing to measure: give a dataset, a variant of ImageNet or a prepared ImageNet-C.")
    if tests.attacks:
        captum("robust")
    if data is not None and tests.corruptions and tests.prepared is None:
        scipy("ndimage")


def check_sizes(subjects: Sequence[Subject], data: Spec | None, tests: Trials, feeding: Feeding) -> None:
    if data is None or not tests.corruptions or tests.prepared is not None:
        return
    for subject in subjects:
        height, width = Look.of(subject, feeding).size
        if min(height, width) < MIN_SIDE:
            raise ConfigError(
                f"Corruptions need images of {MIN_SIDE} pixels or more; {subject.name} takes {height} x {width}. Give "
                f"a larger --image-size, or leave them out with --corruptions none."
            )


def check_classes(subject: Subject, source: AnyData, data: str) -> None:
    ours, theirs = subject.class_names, tuple(source.class_names)
    if subject.num_classes != len(theirs):
        raise DataError(f"{subject.name} tells {subject.num_classes} classes apart; {data} has {len(theirs)}.")
    different = [f"{one!r} / {other!r}" for one, other in zip(ours, theirs, strict=False) if one != other]
    if different:
        raise DataError(
            f"The classes of {data} are not those of {subject.name}, in the same order: {', '.join(different[:5])}."
        )


# -- the work ------------------------------------------------------------------------------------

Progress = Callable[[int, int], None] | None
Work = tuple[str, Callable[[list[Result], Progress], None]]


def plan(subjects: Sequence[Subject], source: AnyData | None, data: str, tests: Trials, feeding: Feeding) -> list[Work]:
    """Everything to run, with its data opened and checked."""
    work: list[Work] = []
    if source is not None:
        for subject in subjects:
            check_classes(subject, source, data)
        real = None if tests.real is None else real_of(source, subjects, tests.real)
        work.append(("clean", functools.partial(run_clean, subjects, source, real, feeding)))
        if tests.attacks:  # these come early: a model that does not repeat itself is not to be measured for hours
            work.append(("attacks", functools.partial(run_attacks, subjects, source, tests.attacks, feeding)))
    for kind, folder in tests.variants.items():
        opened = [open_variant(kind, folder, subject) for subject in subjects]
        work.append((f"ImageNet-{TITLES[kind]}", functools.partial(run_variant, kind, subjects, opened, feeding)))
    for name in tests.corruptions:
        for severity in tests.severities:
            if tests.prepared is not None:
                found = [Variant(open_prepared(tests.prepared, name, severity, subject)) for subject in subjects]
                run = functools.partial(run_prepared, name, severity, subjects, found, feeding)
            else:
                assert source is not None
                corruption = Corrupt(name, severity, tests.severity_set)
                run = functools.partial(run_corruption, corruption, subjects, source, feeding)
            work.append((f"{name} {severity}", run))
    return work


def real_of(source: AnyData, subjects: Sequence[Subject], path: str | PathLike[str]) -> list[frozenset[int]]:
    if not isinstance(source, ImageData):
        raise DataError("ImageNet-Real needs images with names: a folder or a list, not shards.")
    return real_labels(source, read_real(path, min(subject.num_classes for subject in subjects)))


def run_clean(
    subjects: Sequence[Subject],
    source: AnyData,
    real: list[frozenset[int]] | None,
    feeding: Feeding,
    results: list[Result],
    watch: Progress,
) -> None:
    for result, told in zip(results, examine(subjects, source, feeding, watch=watch), strict=True):
        result.clean = told.score
        result.real = None if real is None else real_score(told, real)


def real_score(told: Predictions, real: Sequence[frozenset[int]]) -> Score:
    """Right is any label of the image; images without one are left out."""
    judged = [int(label) in real[index] for index, label in zip(told.indices, told.classes, strict=True) if real[index]]
    return Score(sum(judged), len(judged))


def scores_on(
    subjects: Sequence[Subject],
    opened: Sequence[Variant],
    feeding: Feeding,
    watch: Progress,
    crop: float | None = None,
) -> list[Score]:
    """Of each model on its own view of a folder; all are there before any is kept."""
    return [
        examine([subject], variant.data, feeding, classes=variant.classes, crop=crop, watch=watch)[0].score
        for subject, variant in zip(subjects, opened, strict=True)
    ]


def run_variant(
    kind: str,
    subjects: Sequence[Subject],
    opened: Sequence[Variant],
    feeding: Feeding,
    results: list[Result],
    watch: Progress,
) -> None:
    for result, score in zip(results, scores_on(subjects, opened, feeding, watch), strict=True):
        result.variants[kind] = score


def run_prepared(
    name: str,
    severity: int,
    subjects: Sequence[Subject],
    opened: Sequence[Variant],
    feeding: Feeding,
    results: list[Result],
    watch: Progress,
) -> None:
    """These images are cut out already: no second crop."""
    for result, score in zip(results, scores_on(subjects, opened, feeding, watch, crop=1.0), strict=True):
        result.corruptions.setdefault(name, {})[severity] = score


def run_corruption(
    corruption: Corrupt,
    subjects: Sequence[Subject],
    source: AnyData,
    feeding: Feeding,
    results: list[Result],
    watch: Progress,
) -> None:
    for result, told in zip(
        results, examine(subjects, source, feeding, corruption=corruption, watch=watch), strict=True
    ):
        result.corruptions.setdefault(corruption.name, {})[corruption.severity] = told.score


def run_attacks(
    subjects: Sequence[Subject],
    source: AnyData,
    attacks: Sequence[Attack],
    feeding: Feeding,
    results: list[Result],
    watch: Progress,
) -> None:
    clean = [result.clean for result in results]
    found = attacked(subjects, source, feeding, attacks, [one for one in clean if one is not None], watch)
    for result, scores in zip(results, found, strict=True):
        result.attacks = scores


# -- the report ----------------------------------------------------------------------------------


def report(
    results: Sequence[Result],
    data: Spec | None,
    split: str,
    tests: Trials,
    feeding: Feeding,
    *,
    interrupted: bool = False,
) -> tuple[Finding, dict[str, Any]]:
    columns, table = tabulate(results, tests.attacks)
    settings = {
        "data": None if data is None else str(data),
        "split": split,
        "images": feeding.images,
        "image_size": feeding.image_size,
        "crop": feeding.crop,
        "batch": feeding.batch,
        "device": str(feeding.device),
        "seed": feeding.seed,
        "corruptions": list(tests.corruptions),
        "severities": list(tests.severities),
        "severity_set": None if tests.prepared is not None else tests.severity_set,
        "prepared": None if tests.prepared is None else str(tests.prepared),
        "variants": {name: str(folder) for name, folder in tests.variants.items()},
        "real": None if tests.real is None else str(tests.real),
        "attacks": [plain_attack(attack) for attack in tests.attacks],
        "interrupted": interrupted,
    }
    figures = draw({result.name: result.plain() for result in results})
    pictures = tuple(Picture(name=name, caption=caption) for name, (caption, _) in figures.items())
    found = finding(
        "robustness",
        f"Robustness of {', '.join(result.name for result in results)}",
        columns,
        table,
        settings=settings,
        data={"models": {result.name: result.plain() for result in results}},
        pictures=pictures,
    )
    return found, {name: drawn for name, (_, drawn) in figures.items()}
