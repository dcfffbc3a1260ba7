"""`mixlab train`, `finetune`, `eval`, `predict`, `compare`, `transfer`, `data` and `recipes`."""

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from rich.progress import Progress

from mixlab.cli.printing import show
from mixlab.errors import ConfigError

INTERRUPTED = 130


# -- shared arguments ----------------------------------------------------------------------------


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
            raise ConfigError(f"{flag} takes KEY=VALUE, such as optimiser.lr=1e-3; got {entry!r}.")
        found[key.strip()] = value_of(text.strip())
    return found


RECIPES = {"segmentation": "segmentation_small", "detection": "detection_small"}


def add_run_arguments(parser: ArgumentParser, *, recipe: str) -> None:
    parser.add_argument("--recipe", default=None, help=f"a name from `mixlab recipes`, or a .toml file; else {recipe}")
    parser.add_argument(
        "--set", nargs="*", default=[], help="changes of the recipe: optimiser.lr=1e-3 batch_size=64 ..."
    )
    parser.add_argument(
        "--model-set", nargs="*", default=[], help="changes of the model: in_channels=1 drop_path=0.1 ..."
    )
    parser.add_argument("--epochs", type=int, default=None, help="short for --set schedule.epochs=N")
    parser.add_argument("--image-size", type=int, default=None, help="short for --set image_size=N")
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
    return found | {"options": pairs(arguments.model_set, "--model-set"), "tensorboard": not arguments.no_tensorboard}


# -- train, finetune -----------------------------------------------------------------------------


def train_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Train a model. Example: mixlab train caformer_pico digits --recipe digits --out runs/first. "
        "Killed or stopped with Ctrl-C, it goes on with: mixlab train --resume runs/first. On several processes: "
        "torchrun --nproc-per-node 2 -m mixlab train ..."
    )
    parser.add_argument("model", nargs="?", default=None, help="a name from `mixlab models`")
    parser.add_argument("data", nargs="?", default=None, help="digits, cifar10:PATH, a folder, a list, shards, ...")
    parser.add_argument("--out", default=None, help="a new folder for the run")
    parser.add_argument("--resume", default=None, help="go on with a run folder; needs nothing else")
    parser.add_argument("--config", default=None, help="repeat the config.json of another run, into --out")
    parser.add_argument("--weights", default=None, help="start from a weight file")
    parser.add_argument("--seed", type=int, default=0)
    add_task_argument(parser)
    add_run_arguments(parser, recipe="from_scratch_small")
    return parser


def train(arguments: Namespace) -> int:
    """Train a model by a recipe, or go on with a run."""
    from mixlab.training import run

    if arguments.resume is not None:
        return report(run.resume(arguments.resume))
    if arguments.config is not None:
        need(arguments, "out")
        return report(run.repeat(arguments.config, arguments.out))
    need(arguments, "model", "data", "out")
    return start(arguments, "from_scratch_small", weights=arguments.weights)


def finetune_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Go on from trained weights: at a higher resolution (--image-size 384), or on other data; the "
        "classifier is replaced where the classes differ. Example: mixlab finetune caformer_s18 weights.safetensors "
        "PATH --out runs/mine --freeze 3 --set optimiser.layer_decay=0.7"
    )
    parser.add_argument("model", help="a name from `mixlab models`")
    parser.add_argument("weights", help="a weight file: ours, the authors' or timm's")
    parser.add_argument("data", help="digits, cifar10:PATH, a folder, a list, shards, ...")
    parser.add_argument("--out", default=None, help="a new folder for the run")
    parser.add_argument("--freeze", type=int, default=0, help="layers that stay as they are, counted from the image")
    parser.add_argument("--seed", type=int, default=0)
    add_run_arguments(parser, recipe="finetune")
    return parser


def finetune(arguments: Namespace) -> int:
    """Fine-tune trained weights at another resolution or on other data."""
    need(arguments, "out")
    return start(arguments, "finetune", weights=arguments.weights, freeze_layers=arguments.freeze)


def start(arguments: Namespace, recipe: str, **settings: Any) -> int:
    from mixlab.training import run

    settings |= {"seed": arguments.seed, **settings_of(arguments)}
    changes = changes_of(arguments)
    recipe = recipe_of(arguments, recipe)
    result = run.train(arguments.model, arguments.data, out=arguments.out, recipe=recipe, changes=changes, **settings)
    return report(result)


def need(arguments: Namespace, *names: str) -> None:
    missing = [name for name in names if arguments[name] is None]
    if missing:
        told = ", ".join(f"--{name}" if name == "out" else name.upper() for name in missing)
        raise ConfigError(f"Missing: {told}. See --help, which has an example.")


def report(result: Any) -> int:
    """The end of a run in words."""
    if result.stopped:
        print(f"Stopped; the state is saved. Go on with: mixlab train --resume {result.folder}")
        return INTERRUPTED
    if "top1" not in result.history[-1]:
        for name, metrics in (("val", result.history[-1]), ("test", result.test)):
            if metrics is not None:
                print(f"{name}: {dense_scores(metrics)}")
        print(f"weights: {result.folder / 'final.safetensors'}")
        return 0
    final = result.history[-1]
    print(f"val top-1 {final['top1']:.2f}%, cross-entropy {final['val_loss']:.4f}", end="")
    print(f"; best {result.best['top1']:.2f}% after epoch {result.best['epoch']:.0f}")
    if result.test is not None:
        print(
            f"test top-1 {result.test['top1']:.2f}%, top-5 {result.test['top5']:.2f}% "
            f"of {result.test['images']:.0f} images"
        )
    print(f"weights: {result.folder / 'final.safetensors'}")
    return 0


def dense_scores(metrics: Mapping[str, Any]) -> str:
    """mIoU and accuracies, or average precisions, in words."""
    known = ("mIoU", "pixel_accuracy", "mean_accuracy")
    names = [name for name in metrics if name in known or "_AP" in name]
    return ", ".join(f"{name} {metrics[name]:.4f}" for name in names)


# -- eval, predict -------------------------------------------------------------------------------


def evaluate_parser() -> ArgumentParser:
    parser = ArgumentParser(description="Accuracy of a weight file that `mixlab train` or save_weights wrote.")
    parser.add_argument("weights", help="a .safetensors file with its config inside")
    parser.add_argument("data", help="digits, cifar10:PATH, a folder, a list, shards, ...")
    parser.add_argument("--split", default="val", choices=["train", "val", "test"])
    parser.add_argument("--image-size", type=int, default=None, help="default: the model's own")
    parser.add_argument("--crop", type=float, default=None, help="share of the resized image; default: the model's own")
    parser.add_argument("--search-crop", action="store_true", help="the best crop between 0.8 and 1.0 on this split")
    parser.add_argument("--mode", default="whole", choices=["whole", "sliding", "multiscale"], help="of segmenters")
    parser.add_argument("--window", type=int, default=None, help="of segmenters; default: the size of training crops")
    parser.add_argument("--stride", type=int, default=None, help="of the window; default: two thirds of it")
    parser.add_argument("--batch", type=int, default=None, help="images at once; default: 64, and 4 for detectors")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    return parser


def evaluate(arguments: Namespace) -> None:
    """Measure the accuracy of trained weights."""
    from mixlab.dense.files import task_of
    from mixlab.evals.accuracy import evaluate as run

    task = task_of(arguments.weights)
    if task != "classification":
        return evaluate_dense(arguments, task)
    arguments.batch = arguments.batch or 64
    names = ("split", "image_size", "crop", "search_crop", "batch", "workers", "device")
    result = run(arguments.weights, arguments.data, **{name: arguments[name] for name in names})
    if arguments.json:
        print(json.dumps(result, indent=1))
        return
    print(f"top-1 {result['top1']:.2f}%, top-5 {result['top5']:.2f}%, cross-entropy {result['val_loss']:.4f}", end="")
    print(f" on {result['images']:.0f} images, crop {result['crop']:g}", end="")
    print(" (the best of several on these images)" if arguments.search_crop else "")


def evaluate_dense(arguments: Namespace, task: str) -> None:
    from mixlab.evals.dense import evaluate_dense as run

    common = {"split": arguments.split, "workers": arguments.workers, "device": arguments.device}
    words: dict[str, Any] = {"batch": arguments.batch or 4}
    if task == "segmentation":
        words = {"short_side": arguments.image_size, **{name: arguments[name] for name in ("mode", "window", "stride")}}
    result = run(arguments.weights, arguments.data, **common, **words)
    if arguments.json:
        print(json.dumps(result, indent=1))
        return
    print(f"{dense_scores(result)} on {result['images']} images")
    if "classes" in result:
        rows = [
            [row["name"], *("-" if row[key] is None else f"{100 * row[key]:.1f}" for key in ("IoU", "accuracy"))]
            for row in result["classes"]
        ]
        show(("class", "IoU %", "accuracy %"), rows, right=(1, 2))


def predict_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="What a trained model sees in images. Example: mixlab predict w.safetensors *.jpg. Segmenters and "
        "detectors draw it: mixlab predict w.safetensors *.jpg --out pictures"
    )
    parser.add_argument("weights", help="a .safetensors file with its config inside")
    parser.add_argument("images", nargs="+", help="image files")
    parser.add_argument("--top", type=int, default=5, help="classes per image")
    parser.add_argument("--out", default=None, help="a folder for pictures with masks and boxes drawn onto them")
    parser.add_argument("--threshold", type=float, default=0.5, help="the least score of objects")
    parser.add_argument("--image-size", type=int, default=None, help="default: the model's own")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    return parser


def predict(arguments: Namespace) -> None:
    """Name what images show."""
    from mixlab.dense.files import task_of
    from mixlab.evals.accuracy import predict as run

    if task_of(arguments.weights) != "classification":
        return predict_dense(arguments)
    found = run(arguments.weights, arguments.images, top=arguments.top, image_size=arguments.image_size)
    if arguments.json:
        print(json.dumps([asdict(one) for one in found], indent=1))
        return
    for one in found:
        told = zip(one.classes, one.probabilities, strict=True)
        print(f"{one.image}: " + ", ".join(f"{name} {100 * chance:.1f}%" for name, chance in told))


def predict_dense(arguments: Namespace) -> None:
    from mixlab.evals.dense import predict_dense as run

    need(arguments, "out")
    found = run(arguments.weights, arguments.images, out=arguments.out, threshold=arguments.threshold)
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    for one in found:
        shares = [f"{name} {100 * share:.1f}%" for name, share in one.get("classes", {}).items()]
        objects = [f"{row['class']} {100 * row['score']:.0f}%" for row in one.get("objects", [])]
        print(f"{one['image']}: {', '.join(shares + objects) or 'nothing'}; drawn in {one['picture']}")


# -- compare, transfer ---------------------------------------------------------------------------


def compare_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Train several models alike and say which to take. Example: mixlab compare '*_pico' --data digits "
        "--recipe digits --out runs/mixers --max-ms 10. Killed, the same command goes on where it was."
    )
    parser.add_argument("models", nargs="+", help="names or shell patterns from `mixlab models`")
    parser.add_argument("--data", default="digits", help="digits, cifar10:PATH, a folder, a list, shards, ...")
    parser.add_argument("--out", default=None, help="a folder for runs, comparison.json, .csv and .html")
    parser.add_argument("--seeds", type=int, default=1, help="runs per model; their spread tells noise from gain")
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs at a time, which share the cores: good for small models"
    )
    parser.add_argument("--max-ms", type=float, default=None, help="latency of one image")
    parser.add_argument("--max-mb", type=float, default=None, help="peak memory of one image")
    parser.add_argument("--max-params", type=float, default=None, help="parameters, such as 2e6")
    parser.add_argument("--max-macs", type=float, default=None, help="multiply-accumulates, such as 1e9")
    add_run_arguments(parser, recipe="from_scratch_small")
    return parser


def compare(arguments: Namespace) -> None:
    """Find the mixer for your data: train models alike, compare accuracy and cost."""
    from mixlab.report import Budget, comparison_rows, recommend
    from mixlab.tasks import comparison

    need(arguments, "out")
    limits = {name: arguments[name] for name in ("max_ms", "max_mb", "max_params", "max_macs")}
    for name in ("max_params", "max_macs"):
        limits[name] = None if limits[name] is None else int(limits[name])
    result = comparison.compare(
        arguments.models,
        arguments.data,
        out=arguments.out,
        recipe=arguments.recipe or "from_scratch_small",
        changes=changes_of(arguments),
        seeds=arguments.seeds,
        budget=Budget(**limits),
        jobs=arguments.jobs,
        **settings_of(arguments),
    )
    header, rows = comparison_rows(result)
    show(header, rows, right=range(1, len(header)))
    advice = recommend(result)
    console = Console(highlight=False)
    console.print(advice.headline, style="bold")
    for sentence in advice.sentences:
        console.print(sentence)
    print(f"page: {Path(arguments.out) / comparison.PAGE}")


def transfer_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="The VTAB-1K protocol: sweep learning rates on train and val, train the best on both, test. "
        "Several datasets give the averages of their categories. Example: mixlab transfer vil_tiny "
        "--weights w.safetensors --data vtab/cifar:PATH vtab/dtd:PATH --out runs/vtab"
    )
    parser.add_argument("model", help="a name from `mixlab models`")
    parser.add_argument("--data", nargs="+", default=["digits"], help="datasets with train, val and test")
    parser.add_argument("--weights", default=None, help="pre-trained weights")
    parser.add_argument("--out", default=None, help="a folder for the runs")
    add_run_arguments(parser, recipe="vision_lstm_vtab")
    return parser


def transfer(arguments: Namespace) -> None:
    """Transfer a model to datasets by the VTAB-1K protocol."""
    from mixlab.tasks.transfer import averages
    from mixlab.tasks.transfer import transfer as run

    need(arguments, "out")
    results = []
    for data in arguments.data:
        folder = Path(arguments.out) / data.split(":")[0].replace("/", "-")
        common = {
            "recipe": arguments.recipe or "vision_lstm_vtab",
            "changes": changes_of(arguments),
            "weights": arguments.weights,
        }
        results.append(run(arguments.model, data, out=folder, **common, **settings_of(arguments)))
    rows = [
        (one.data, f"{one.lr:g}", f"{one.mean:.2f}", " ".join(f"{top1:.2f}" for top1 in one.test)) for one in results
    ]
    show(("data", "lr", "test top-1", "seeds"), rows, right=(1, 2))
    if len(results) > 1:
        show(
            ("average of", "test top-1"),
            [(name, f"{mean:.2f}") for name, mean in averages(results).items()],
            right=(1,),
        )


# -- data, recipes -------------------------------------------------------------------------------


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
    show(("recipe", "source"), [(name, load_recipe(name).source) for name in list_recipes()], right=())
