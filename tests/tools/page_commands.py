"""The commands of docs/reproduce.md, sorted by shape, and what makes a command of each kind short."""

import functools
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mixlab.cli.arguments import changes_of
from mixlab.training.recipe import load_recipe
from tests.docs_blocks import blocks, commands_of, lines_of, parser

PAGE = "reproduce.md"
TRAINING = ("train", "finetune", "transfer")
ONE_UPDATE = ("schedule.updates=1", "schedule.warmup_updates=0", "schedule.cooldown_epochs=0", "batch_size=2")
TWO_UPDATES = ("schedule.updates=2", "schedule.milestones=[1]", *ONE_UPDATE[1:])  # a step needs a place between two
FLOAT = "precision=float32"
SMALL_SEGMENTER = ("image_size=224", "segmentation.width=8", "segmentation.auxiliary_width=8")
SMALL_DETECTOR = (
    *("detection.shorter=[64]", "detector.shorter=64", "detector.longer=96", "detector.width=64"),
    *("detector.head_width=16", "detector.region_samples=8", "detector.proposals=20", "detector.queries=8"),
    *("detector.deformable.encoder_layers=1", "detector.deformable.decoder_layers=1"),
    "detector.deformable.feedforward=32",
)
RUN = ("--workers", "0", "--device", "cpu", "--no-tensorboard", "--micro", "2")
FEW = ("--batch", "2", "--workers", "0", "--device", "cpu")
BENCH = ("--device", "cpu", "--seconds", "0.01", "--rounds", "1")


@dataclass(frozen=True)
class Runner:
    """How a kind of command is made short: arguments behind its own. `flags` are all that it is prepared for."""

    flags: frozenset[str]
    short: tuple[str, ...] = ()

    @classmethod
    def of(cls, flags: str, *short: str) -> "Runner":
        return cls(frozenset(f"--{flag}" for flag in flags.split()), short)


RUNNERS: Mapping[str, Runner] = {
    "train classification": Runner.of(
        "recipe out image-size model-set", *RUN, "--image-size", "64", "--set", *ONE_UPDATE, FLOAT
    ),
    "train segmentation": Runner.of(
        "recipe out weights model-set", *RUN, "--set", *ONE_UPDATE, FLOAT, *SMALL_SEGMENTER
    ),
    "train detection": Runner.of("recipe out weights set", *RUN, "--set", *TWO_UPDATES, FLOAT, *SMALL_DETECTOR),
    "finetune": Runner.of("recipe out class-map", *RUN, "--image-size", "64", "--set", *ONE_UPDATE, FLOAT),
    "transfer": Runner.of(
        "recipe out weights data",
        *(*RUN, "--image-size", "64", "--set", *ONE_UPDATE, FLOAT, "sweep.lr=[0.001]", "sweep.seeds=1"),
    ),
    "eval classification": Runner.of("search-crop", *FEW),
    "eval segmentation": Runner.of("mode", "--workers", "0", "--device", "cpu", "--image-size", "64"),
    "robustness": Runner.of(
        "imagenet-a imagenet-c imagenet-r imagenet-real imagenet-sketch imagenet-v2 attacks corruptions out",
        *(*FEW, "--images", "2", "--severities", "1"),
    ),
    "disagree": Runner.of("average", *FEW),
    "resolution": Runner.of("sizes step seconds no-memory out", *FEW, "--sizes", "64", "96"),
    "erf": Runner.of(
        "data at count scale image-size out", "--count", "1", "--batch", "1", "--device", "cpu", "--image-size", "64"
    ),
    "truncate": Runner.of("out", *FEW, "--images", "2", "--shares", "0.5"),
    "kernels": Runner.of("out"),
    "look": Runner.of("what out"),
    "info": Runner.of("image-size"),
    "models": Runner.of("chart measured"),
    "report": Runner.of("out"),
    "bench": Runner.of(
        "sizes batches dtypes device model-set training optimizer compile out",
        *(*BENCH, "--sizes", "64", "--batches", "2", "--dtypes", "float32", "--skip", "memory", "compile_time"),
    ),
    "bench mixers": Runner.of("mixers lengths device out", *BENCH, "--lengths", "16", "64", "256"),
    "bench activations": Runner.of("activations device out", *BENCH, "--units", "1000"),
    "bench compute": Runner.of("compute sizes out", "--sizes", "64", "128"),
    "bench recipes": Runner.of("compute recipe out"),
}


@dataclass(frozen=True)
class Command:
    """A line of the page without the program's name, and as its parser reads it."""

    words: tuple[str, ...]

    @property
    def verb(self) -> str:
        return self.words[0]

    @functools.cached_property
    def arguments(self) -> Any:
        return parser().parse_args(list(self.words))[self.verb]

    @property
    def flags(self) -> frozenset[str]:
        return frozenset(word for word in self.words if word.startswith("--"))

    @property
    def recipe(self) -> Any:
        """The resolved recipe of a command that trains."""
        return load_recipe(self.arguments.recipe, model=self.arguments.model, changes=changes_of(self.arguments))

    @property
    def kind(self) -> str:
        """Which runner it needs."""
        if self.verb == "train":
            return f"train {self.recipe.task}"
        if self.verb == "eval":
            return "eval segmentation" if self.arguments.mode else "eval classification"
        if self.verb == "bench":
            mode = next((name for name in ("mixers", "activations", "compute") if f"--{name}" in self.flags), "")
            return f"bench {'recipes' if '--recipe' in self.flags else mode}".strip()
        return self.verb

    @property
    def data(self) -> str:
        """The kind of its data: "ade20k", "imagenet", "vtab", ..."""
        given = self.arguments.get("data") or ""
        return (given if isinstance(given, str) else given[0]).partition(":")[0]

    @property
    def head(self) -> str:
        """What a run for maps puts onto the backbone."""
        recipe = self.recipe if self.kind in ("train detection", "train segmentation") else None
        part = recipe and (recipe.detector or recipe.segmentation)
        return "" if part is None else getattr(part, "kind", None) or part.decoder

    @property
    def origin(self) -> str:
        """Where its models come from, if not from runs of the page: timm, the papers' releases, whole tasks."""
        patterns = {
            "heads": r"(upernet|mask_rcnn|cascade_mask_rcnn):",
            "released": r"(\w+=)?released$",
            "timm": r"(.+:)?timm:",
        }
        return "+".join(
            name for name, pattern in patterns.items() if any(re.match(pattern, word) for word in self.words)
        )

    @functools.cached_property
    def shape(self) -> str:
        """Commands of one shape differ in names, numbers and folders only."""
        return " ".join(filter(None, [self.kind, self.head, self.data, self.origin, *sorted(self.flags)]))

    @property
    def short(self) -> list[str]:
        """What is run in its place: the same command with arguments that make it short."""
        return [*self.words, *RUNNERS[self.kind].short]

    def __str__(self) -> str:
        return shlex.join(self.words)


@functools.cache
def page_commands() -> tuple[Command, ...]:
    """Every command of the page in order."""
    texts = [block.text for block in blocks() if block.page == PAGE and block.is_shell]
    lines = [line.partition("  # ")[0] for text in texts for line, _ in lines_of(text)]
    commands = [words for line in lines for words in commands_of(line)]
    return tuple(Command(tuple(words)) for program, *words in commands if program == "mixlab")


@functools.cache
def shapes() -> dict[str, Command]:
    """The command of every shape that has the fewest words."""
    shortest: dict[str, Command] = {}
    for command in page_commands():
        known = shortest.setdefault(command.shape, command)
        if len(command.words) < len(known.words):
            shortest[command.shape] = command
    return shortest


@functools.cache
def written_by() -> dict[str, Command]:
    """Which command makes each run folder of the page."""
    return {command.arguments.out: command for command in page_commands() if command.verb in TRAINING}


def weight_files(words: Sequence[str]) -> list[str]:
    return [word for word in words if word.startswith("runs/") and word.endswith(".safetensors")]
