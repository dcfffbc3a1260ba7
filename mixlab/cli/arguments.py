"""Arguments and words that several verbs share."""

import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from mixlab.core.errors import ConfigError


def value_of(text: str) -> Any:
    """A value as TOML writes it; what is none is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def pairs(entries: Iterable[str], flag: str) -> dict[str, Any]:
    """["a.b=1"] as {"a.b": 1}."""
    found = {}
    for entry in entries:
        key, mark, text = entry.partition("=")
        if not mark or not key:
            raise ConfigError(f"{flag} takes KEY=VALUE, such as optimizer.lr=1e-3; got {entry!r}.")
        found[key.strip()] = value_of(text.strip())
    return found


RECIPES = {"segmentation": "segmentation_small", "detection": "detection_small"}


def add_run_arguments(parser: ArgumentParser, *, recipe: str, chooses_splits: bool = True) -> None:
    parser.add_argument("--recipe", default=None, help=f"a name from `mixlab recipes`, or a .toml file; else {recipe}")
    parser.add_argument(
        "--set",
        nargs="*",
        action="extend",
        default=[],
        help="changes of the recipe: optimizer.lr=1e-3 batch_size=64 ...",
    )
    parser.add_argument(
        "--model-set",
        nargs="*",
        action="extend",
        default=[],
        help="changes of the model: in_channels=1 drop_path=0.1 ...",
    )
    parser.add_argument("--epochs", type=int, default=None, help="short for --set schedule.epochs=N")
    parser.add_argument("--image-size", type=int, default=None, help="short for --set image_size=N")
    if chooses_splits:
        parser.add_argument(
            "--train-splits",
            nargs="+",
            default=None,
            choices=["train", "val"],
            help="what to train on; with val, test is evaluated and no epoch is chosen. Default: the recipe's",
        )
    parser.add_argument("--micro", type=int, default=None, help="images per process at once; default: as many as fit")
    parser.add_argument("--workers", type=int, default=2, help="processes that load data")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, mps or auto")
    parser.add_argument("--sharding", default="ddp", choices=["ddp", "fsdp"], help="under torchrun: copies or shards")
    parser.add_argument("--compile", action="store_true", help="compile the blocks (needs a C++ compiler on a CPU)")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations to save memory")
    parser.add_argument("--no-tensorboard", action="store_true", help="write no TensorBoard files")
    parser.add_argument("--save-updates", type=int, default=0, help="checkpoint every N updates; 0: every 5 minutes")


def add_task_argument(parser: ArgumentParser) -> None:
    tasks = ["classification", *RECIPES]
    parser.add_argument("--task", default=None, choices=tasks, help="default: the recipe's; picks the default recipe")


def recipe_of(arguments: Namespace, default: str) -> str:
    """The one that was asked for, or the task's own; both must agree."""
    from mixlab.training.recipe import load_recipe

    task = arguments.get("task")
    recipe: str = arguments.recipe or RECIPES.get(task, default)
    if task is not None and load_recipe(recipe, model=arguments.model or "").task != task:
        raise ConfigError(f"The recipe {recipe!r} is not for {task}. `mixlab recipes` lists what each is for.")
    return recipe


def changes_of(arguments: Namespace) -> dict[str, Any]:
    changes = pairs(arguments.set, "--set")
    changes |= {} if arguments.epochs is None else {"schedule.epochs": arguments.epochs}
    return changes | ({} if arguments.image_size is None else {"image_size": arguments.image_size})


def settings_of(arguments: Namespace) -> dict[str, Any]:
    names = ("micro", "workers", "device", "sharding", "compile", "checkpointing", "save_updates")
    found = {name: arguments[name] for name in names}
    if arguments.get("train_splits") is not None:
        found["train_splits"] = tuple(arguments.train_splits)
    return found | {"options": pairs(arguments.model_set, "--model-set"), "tensorboard": not arguments.no_tensorboard}


def need(arguments: Namespace, *names: str) -> None:
    missing = [name for name in names if arguments[name] is None]
    if missing:
        told = ", ".join(f"--{name}" if name == "out" else name.upper() for name in missing)
        raise ConfigError(f"Missing: {told}. See --help, which has an example.")


def dense_scores(metrics: Mapping[str, Any]) -> str:
    """mIoU and accuracies, or average precisions, in words."""
    known = ("mIoU", "pixel_accuracy", "mean_accuracy")
    names = [name for name in metrics if name in known or "_AP" in name]
    return ", ".join(f"{name} {metrics[name]:.4f}" for name in names)
