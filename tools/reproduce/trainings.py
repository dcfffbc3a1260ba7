"""Runs behind the papers' tables as commands: trainings on ImageNet, and from their weights to other data."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mixlab.dense.timm_maps import is_timm
from mixlab.training.recipe import load_recipe
from mixlab.training.routes import phases_of
from tools.reproduce.tables import Target

IMAGENET_21K = "imagenet21k"  # at the end of a recipe's name: it is for this dataset
PLAIN_WORD = re.compile(r"[\w=.:/-]+")  # what a shell takes as it is
PLACE = re.compile(r"\{(.+?)\}")  # in the template of a command
MOST_FIGURES = 6  # in the comment behind a command
Printed = dict[str, str]  # folders of the runs that the page has commands for, each with the table where they stand


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model gets its ImageNet weights: recipes in order, and what is changed in it.

    Without a recipe they are public: those of timm for "timm:NAME", else what their authors released. `folder_name`
    keeps the runs of a changed model apart.
    """

    model: str
    phases: tuple[str, ...]
    image_size: int = 224
    change: str = ""
    folder_name: str = ""

    @property
    def root(self) -> str:
        """The folder of all runs of this model in this form."""
        return "/".join(["runs", self.model.replace(":", "_"), *filter(None, [self.folder_name])])

    @property
    def asked_size(self) -> int | None:
        """The image size to ask for, where the last recipe has another one."""
        size = load_recipe(self.phases[-1], model=self.model).image_size
        return None if size in (None, self.image_size) else self.image_size

    def folder(self, phase: int) -> str:
        return f"{self.root}/{self.phases[phase]}" + (f"_{self.asked_size}" if self.asked_size else "")

    @property
    def weights(self) -> str:
        """What `--weights` takes."""
        if is_timm(self.model):
            return "pretrained"
        return f"{self.folder(-1)}/final.safetensors" if self.phases else "released"

    @property
    def subject(self) -> str:
        """The trained model for instruments, which take weight files and NAME=WEIGHTS."""
        return self.weights if self.phases else f"{self.model}={self.weights}"


def training_of(model: str, image_size: int = 224, pretraining: str | None = None) -> Training:
    """The training of a model as it is named."""
    return Training(model=model, phases=phases_of(model, image_size, pretraining), image_size=image_size)


def data_of(recipe: str) -> str:
    return IMAGENET_21K if recipe.endswith(IMAGENET_21K) else "imagenet"


# -- commands ------------------------------------------------------------------------------------


def training_commands(
    training: Training, printed: Printed, table: str, *, figure: str, evaluate: str = ""
) -> Iterator[str]:
    """The phases that no table before has run; the last command has the paper's figure as a comment.

    `evaluate` are flags of a `mixlab eval` that the figure needs after the training.
    """
    if not training.phases and training.subject not in printed:
        printed[training.subject] = table
        yield f"mixlab robustness {training.subject} imagenet --corruptions none --attacks none{comment(figure)}"
    for index, recipe in enumerate(training.phases):
        folder, last = training.folder(index), index == len(training.phases) - 1
        if folder in printed:
            continue
        printed[folder] = table
        start = f"train {training.model} {data_of(recipe)}"
        if index:
            start = f"finetune {training.model} {training.folder(index - 1)}/final.safetensors {data_of(recipe)}"
        yield join(
            f"mixlab {start} --recipe {recipe} --out {folder}",
            f"--image-size {training.asked_size}" if training.asked_size else "",
            "--class-map imagenet21k" if "_from21k" in recipe else "",
            model_set(training.change),
        ) + comment(figure if last and not evaluate else "")
        if last and evaluate:
            yield f"mixlab eval {training.weights} imagenet {evaluate}{comment(figure)}"


def transfer_folder(training: Training, target: Target) -> str:
    """Where a run on other data goes: recipes that are for several datasets or detectors have a folder for each."""
    name = target.recipe if target.data in target.recipe else f"{target.recipe}_{target.data}"
    return f"{training.root}/{name}" + ("_cascade" if target.set else "")


def transfer_commands(
    training: Training, target: Target, printed: Printed, table: str, figures: Sequence[str]
) -> Iterator[str]:
    """The run on other data, and its evaluation if that is another command; with the figures that each gives."""
    folder = transfer_folder(training, target)
    if folder in printed:
        return
    printed[folder] = table
    trained, evaluated = figures[: len(target.measures)], figures[len(target.measures) :]
    yield join(
        f"{transfer_start(training, target)} --out {folder}",
        f"--set {target.set}" if target.set else "",
        model_set("; ".join(filter(None, [training.change, target.change_of(training.model)]))),
    ) + comment(*name_figures(target.measures, trained))
    if target.evaluate:
        command = f"mixlab eval {folder}/final.safetensors {target.data}:PATH {target.evaluate}"
        yield command + comment(*name_figures(target.evaluated, evaluated))


def transfer_start(training: Training, target: Target) -> str:
    recipe = load_recipe(target.recipe, model=training.model)
    data = f"{target.data}:PATH"
    if recipe.sweep is not None:
        return f"mixlab transfer {training.model} --weights {training.weights} --recipe {target.recipe} --data {data}"
    if recipe.task == "classification":
        return f"mixlab finetune {training.model} {training.weights} {data} --recipe {target.recipe}"
    return f"mixlab train {training.model} {data} --recipe {target.recipe} --weights {training.weights}"


def measurement_command(template: str, names: Sequence[str], image_size: int, pretraining: str | None) -> str:
    """A command with its places filled: {models} and {weights} are all names as they are and trained, {NAME} is one."""

    def filled(match: re.Match[str]) -> str:
        if match[1] == "models":
            return " ".join(map(quote, names))
        trained = names if match[1] == "weights" else [match[1]]
        return " ".join(training_of(name, image_size, pretraining).subject for name in trained)

    return PLACE.sub(filled, template)


# -- words of a shell ----------------------------------------------------------------------------


def model_set(change: str) -> str:
    """KEY=VALUE pairs, parted by semicolons, as a flag."""
    return f"--model-set {' '.join(map(quote, change.split('; ')))}" if change else ""


def quote(text: str) -> str:
    return text if PLAIN_WORD.fullmatch(text) else f"'{text}'"


def join(*parts: str) -> str:
    return " ".join(filter(None, parts))


def name_figures(names: Sequence[str], figures: Sequence[str]) -> list[str]:
    """["mIoU 41.2"]; with many measures the table alone has them."""
    if len(names) > MOST_FIGURES:
        return []
    return [f"{name} {figure}" for name, figure in zip(names, figures, strict=True)]


def comment(*figures: str) -> str:
    shown = ", ".join(filter(None, figures))
    return f"  # {shown}" if shown else ""
