"""`mixlab data` and `recipes`."""

import json

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from rich.progress import Progress

from mixlab.cli.arguments import RECIPES
from mixlab.cli.printing import show


def data_parser() -> ArgumentParser:
    parser = ArgumentParser(description="Look through a dataset before training on it. Example: mixlab data check PATH")
    parser.add_argument("action", choices=["check"], help="check: classes, counts, sizes, unreadable files, duplicates")
    parser.add_argument("data", help="digits, cifar10:PATH, a folder, a list, shards, ...")
    parser.add_argument("--task", default="classification", choices=["classification", *RECIPES], help="what it is for")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    return parser


def data(arguments: Namespace) -> int:
    """Check a dataset: what it holds and what is wrong with it."""
    from mixlab.data import check_data
    from mixlab.data.check_dense import check_dense

    with Progress(console=Console(stderr=True), transient=True) as bar:
        reading = bar.add_task("Reading images", total=None)

        def told(done: int, total: int) -> None:
            bar.update(reading, completed=done, total=total)

        if arguments.task == "classification":
            found = check_data(arguments.data, progress=told)
        else:
            found = check_dense(arguments.data, arguments.task, progress=told)
    print(json.dumps(found.plain(), indent=1) if arguments.json else found.text())
    return 1 if found.problems else 0


def recipes_parser() -> ArgumentParser:
    parser = ArgumentParser(description="List the recipes, or show one as it applies to a model.")
    parser.add_argument("name", nargs="?", default=None, help="a recipe to show")
    parser.add_argument("--model", default="", help="with the values for this model")
    return parser


def recipes(arguments: Namespace) -> None:
    """List the training recipes, or show one."""
    from mixlab.training.recipe import flat, list_recipes, load_recipe

    if arguments.name is not None:
        row = flat(load_recipe(arguments.name, model=arguments.model).plain())
        show(("key", "value"), [(key, str(value)) for key, value in row.items()], right=())
        return
    listed = [load_recipe(name) for name in list_recipes()]
    show(("recipe", "task", "source"), [(one.name, one.task, one.source) for one in listed], right=())
