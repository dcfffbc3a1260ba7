"""`mixlab train`, `finetune`, `compare` and `transfer`."""

from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console

from mixlab.cli.arguments import (
    add_run_arguments,
    add_task_argument,
    changes_of,
    dense_scores,
    need,
    recipe_of,
    settings_of,
)
from mixlab.cli.printing import show

INTERRUPTED = 130


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
    parser.add_argument("--weights", default=None, help="start from a weight file, or released: the public weights")
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
        "PATH --out runs/mine --freeze 3 --set optimizer.layer_decay=0.7"
    )
    parser.add_argument("model", help="a name from `mixlab models`")
    parser.add_argument("weights", help="a weight file: ours, the authors' or timm's")
    parser.add_argument("data", help="digits, cifar10:PATH, a folder, a list, shards, ...")
    parser.add_argument("--out", default=None, help="a new folder for the run")
    parser.add_argument(
        "--class-map",
        default=None,
        help="which rows of the weights' larger classifier are the classes of the data: a file with a line per class "
        "(a row, a class name, or - for none), or imagenet21k",
    )
    parser.add_argument("--freeze", type=int, default=0, help="layers that stay as they are, counted from the image")
    parser.add_argument("--seed", type=int, default=0)
    add_run_arguments(parser, recipe="finetune")
    return parser


def finetune(arguments: Namespace) -> int:
    """Fine-tune trained weights at another resolution or on other data."""
    need(arguments, "out")
    settings = {"weights": arguments.weights, "freeze_layers": arguments.freeze, "class_map": arguments.class_map}
    return start(arguments, "finetune", **settings)


def start(arguments: Namespace, recipe: str, **settings: Any) -> int:
    from mixlab.training import run

    settings |= {"seed": arguments.seed, **settings_of(arguments)}
    changes = changes_of(arguments)
    recipe = recipe_of(arguments, recipe)
    result = run.train(arguments.model, arguments.data, out=arguments.out, recipe=recipe, changes=changes, **settings)
    return report(result)


def report(result: Any) -> int:
    """The end of a run in words."""
    from mixlab.core.processes import environment

    if environment()[0]:  # the first process speaks for all
        return INTERRUPTED if result.stopped else 0
    if result.stopped:
        print(f"Stopped; the state is saved. Go on with: mixlab train --resume {result.folder}")
        return INTERRUPTED
    final, split = result.history[-1], result.evaluated_on
    if split is None:
        print(f"training loss {final['train_loss']:.4f}; no split was left to evaluate on")
    elif "top1" not in final:
        for name, metrics in ((split, final), ("test", result.test)):
            if metrics is not None:
                print(f"{name}: {dense_scores(metrics)}")
    else:
        report_accuracy(result)
    print_weights(result)
    return 0


def report_accuracy(result: Any) -> None:
    final = result.history[-1]
    print(f"{result.evaluated_on} top-1 {final['top1']:.2f}%, cross-entropy {final['val_loss']:.4f}", end="")
    chosen = result.best is not None
    print(f"; best {result.best['top1']:.2f}% after epoch {result.best['epoch']:.0f}" if chosen else "")
    if result.test is not None:
        print(
            f"test top-1 {result.test['top1']:.2f}%, top-5 {result.test['top5']:.2f}% "
            f"of {result.test['images']:.0f} images"
        )


def print_weights(result: Any) -> None:
    """Say where the weights of a finished run are, unless it kept none."""
    file = result.folder / "final.safetensors"
    if file.exists():
        print(f"weights: {file}")


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
    from mixlab.workflows import comparison

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
        "vtab:PATH stands for all of its tasks below PATH and gives the means of Vision-LSTM's Table 3. Example: "
        "mixlab transfer vil_tiny --weights w.safetensors --data vtab:PATH --out runs/vtab. Stopped or killed, the "
        "same command goes on where it was."
    )
    parser.add_argument("model", help="a name from `mixlab models`")
    parser.add_argument(
        "--data", nargs="+", default=["digits"], help="vtab:PATH, vtab/TASK:PATH, or other data with train, val, test"
    )
    parser.add_argument("--weights", default=None, help="pre-trained weights")
    parser.add_argument("--out", default=None, help="a folder for the runs")
    parser.add_argument(
        "--keep",
        default="final",
        choices=["final", "results"],
        help="what tested runs leave: final weights too, or results only; runs of the sweep leave results only",
    )
    add_run_arguments(parser, recipe="vision_lstm_vtab", chooses_splits=False)
    return parser


def transfer(arguments: Namespace) -> None:
    """Transfer a model to datasets by the VTAB-1K protocol."""
    from mixlab.data.vtab import task_name
    from mixlab.workflows.transfer import average_row, describe_missing, transfer_all

    need(arguments, "out")
    summary = transfer_all(
        arguments.model,
        arguments.data,
        out=arguments.out,
        recipe=arguments.recipe or "vision_lstm_vtab",
        changes=changes_of(arguments),
        weights=arguments.weights,
        keep=arguments.keep,
        **settings_of(arguments),
    )
    datasets = [result.data for result in summary.results]
    rows = [
        (result.data, f"{result.lr:g}", f"{result.mean:.2f}", " ".join(f"{top1:.2f}" for top1 in result.test))
        for result in summary.results
    ]
    show(("data", "lr", "test top-1", "seeds"), rows, right=(1, 2))
    if any(task_name(data) is not None for data in datasets):
        header, row = average_row(summary)
        show(header, [row], right=range(1, len(header)))
        if summary.missing:
            print(describe_missing(datasets))
    elif len(datasets) > 1:
        print(f"average of {len(datasets)} datasets: {summary.averages['average']:.2f}")
