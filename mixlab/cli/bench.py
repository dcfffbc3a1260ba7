"""`mixlab bench`: speed, memory and compute of models, token mixers and activations."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from mixlab.cli.arguments import pairs
from mixlab.cli.findings import add_output_arguments, check_out, put_out
from mixlab.cli.printing import parse_size, show
from mixlab.cli.progress import status
from mixlab.core.errors import ConfigError
from mixlab.findings.findings import Cell, Finding, show_cell, write_finding

MODES = ("mixers", "activations", "compute")
# what belongs to which mode; "models" is the one without a flag
FOR = {
    "batches": ("models", "mixers"),
    "dtypes": ("models", "mixers", "activations"),
    "sizes": ("models", "compute"),
    "training": ("models", "activations"),
    "optimizer": ("models",),
    "compile": ("models", "activations"),
    "layout": ("models",),
    "against": ("models",),
    "skip": ("models",),
    "model_set": ("models", "compute"),
    "device": ("models", "mixers", "activations"),
    "threads": ("models", "mixers", "activations"),
    "seconds": ("models", "mixers", "activations"),
    "rounds": ("models", "mixers", "activations"),
    "lengths": ("mixers",),
    "dim": ("mixers",),
    "limit_seconds": ("mixers",),
    "units": ("activations",),
    "recipe": ("compute",),
    "images": ("compute",),
    "tflops": ("compute",),
    "drop_path": ("compute",),
}
# told below the table where all rows agree
CONSTANTS = (
    "machine",
    "device",
    "threads",
    "warmup",
    "layout",
    "optimizer",
    "compiled",
    "dim",
    "batch",
    "dtype",
    "units",
    "changes",
)


def bench_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Speed, latency, memory and compute. Example: mixlab bench caformer_s18 vil_tiny --sizes 224 384 "
        "--batches 1 8 --against timm:resnet50 --out bench. Token mixers alone: mixlab bench --mixers attention mlstm "
        "hyena_pixel:filter=separable --lengths 1024 4096 16384. Activations alone: mixlab bench --activations. MACs "
        "against resolution: mixlab bench vil_tiny deit_tiny --compute. Training compute: mixlab bench vil_base "
        "--compute --recipe vision_lstm_imagenet_192 vision_lstm_imagenet_224; as papers train: mixlab bench vil_tiny "
        "caformer_s18 --compute --recipe"
    )
    parser.add_argument(
        "models",
        nargs="*",
        default=[],
        help="names, NAME=WEIGHTS, weight files, timm:NAME; upernet:NAME, linear:NAME, mask_rcnn:NAME, "
        "cascade_mask_rcnn:NAME and deformable_detr:NAME with --sizes 512x2048 or 800x1333",
    )
    add_mode_arguments(parser)
    add_model_arguments(parser)
    add_timing_arguments(parser)
    add_output_arguments(parser)
    return parser


def add_mode_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--mixers", nargs="*", default=None, help="token mixers alone; NAME or NAME:KEY=VALUE,...; default: six of them"
    )
    add("--lengths", nargs="+", type=int, default=None, help="of --mixers: numbers of tokens")
    add("--dim", type=int, default=None, help="of --mixers: channels; default: 64")
    add("--limit-seconds", type=float, default=None, help="of --mixers: longest run; default: 60")
    add("--activations", nargs="*", default=None, help="activations alone; default: all")
    add("--units", type=int, default=None, help="of --activations: size of the input; default: 1000000")
    add("--compute", action="store_true", help="no timing: MACs against resolution, or with --recipe all of a training")
    add(
        "--recipe",
        nargs="*",
        default=None,
        help="of --compute: recipes, which are phases of one training, for all models; MODEL=RECIPE for one of them; "
        "models without any, or all after a bare --recipe, have their papers'",
    )
    add(
        "--images",
        type=int,
        default=None,
        help="of --compute: training images; default: those of the recipe's ImageNet",
    )
    add("--drop-path", default=None, choices=["skip", "mask"], help="of --compute: dropped blocks; default: skip")
    add("--tflops", type=float, default=None, help="of --compute: TFLOP/s that a GPU achieves; default: 100")


def add_model_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--sizes", nargs="+", default=None, help="images: a side, or HEIGHTxWIDTH; default: 224")
    add("--batches", nargs="+", type=int, default=None, help="default: 1 8; of --mixers: 1")
    add("--dtypes", nargs="+", default=None, help="float32, tf32, bfloat16, float16, float64; default: float32")
    add("--training", action="store_true", help="also a training step: forward and backward")
    add(
        "--optimizer",
        "--optimiser",
        default=None,
        choices=["none", "adamw", "lamb", "sgd"],
        help="of the training step",
    )
    add("--compile", action="store_true", help="also compiled, with the time that compiling takes")
    add("--layout", default=None, choices=["contiguous", "channels_last"], help="of images and weights in memory")
    add("--against", default=None, help="a model that takes turns with every other, for a ratio")
    add(
        "--model-set",
        nargs="+",
        action="extend",
        default=None,
        help="changes of all models, though not of --against: mlp_ratio=2 mixers=pool ...; models of timm have none",
    )
    add("--device", default=None, help="cpu, cuda, cuda:1, mps or auto; default: cpu")
    add("--skip", nargs="+", default=None, choices=["memory", "compile_time"], help="what not to measure")


def add_timing_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--threads", type=int, default=None, help="of PyTorch on a CPU; default: as many as it takes itself")
    add(
        "--seconds",
        type=float,
        default=None,
        help="timing per row; ratios on a busy machine take up to 15 times as long; default: 2",
    )
    add("--rounds", type=int, default=None, help="the least number of timed runs; default: 10")


def bench(arguments: Namespace) -> int:
    """Measure speed, memory and compute of models, mixers or activations."""
    mode = mode_of(arguments)
    check_out(arguments)
    run: Callable[..., tuple[Finding, dict[str, Any]]] = RUNS[mode]
    with status("starting") as watch:
        found, figures = run(arguments, watch)
    if arguments.out is not None:
        target = write_finding(found, arguments.out, figures)
    shown = found if arguments.json else for_people(found)
    put_out(shown, Namespace(out=None, json=arguments.json))
    if not arguments.json:
        print_below(found)
        if arguments.out is not None:
            print(f"written: {target}")
    return 130 if found.settings.get("interrupted") else 0


def mode_of(arguments: Namespace) -> str:
    """Which of the four it is; arguments of another one are errors."""
    chosen = [mode for mode in MODES if arguments[mode] not in (None, False)]
    if len(chosen) > 1:
        raise ConfigError(f"One of {', '.join('--' + mode for mode in chosen)} at a time.")
    mode = chosen[0] if chosen else "models"
    if mode in ("models", "compute") and not arguments.models:
        raise ConfigError("Missing: MODEL. See --help, which has examples.")
    if mode in ("mixers", "activations") and arguments.models:
        raise ConfigError(f"--{mode} takes no models; got {', '.join(arguments.models)}.")
    for name, modes in FOR.items():
        if mode not in modes and arguments[name] not in (None, False):
            flags = " or ".join("models" if one == "models" else f"--{one}" for one in modes)
            raise ConfigError(f"--{name.replace('_', '-')} is for {flags}, not for {mode}.")
    if arguments.optimizer not in (None, "none") and not arguments.training:
        raise ConfigError("--optimizer is part of a training step: add --training.")
    training_only = [name for name in ("images", "drop_path", "tflops") if arguments[name] is not None]
    if training_only and arguments.recipe is None:
        raise ConfigError(f"--{training_only[0].replace('_', '-')} is of a training: add --recipe.")
    return mode


def given(arguments: Namespace, *names: str) -> dict[str, Any]:
    """What was said; the functions have their own defaults."""
    return {name: arguments[name] for name in names if arguments[name] is not None}


def changes_of(arguments: Namespace) -> dict[str, Any]:
    """What --model-set says, if anything."""
    return {} if arguments.model_set is None else {"changes": pairs(arguments.model_set, "--model-set")}


def plan_of(arguments: Namespace, **usual: Any) -> Any:
    from mixlab.metrics.timing import Rounds

    said = {"seconds": arguments.seconds, "least": arguments.rounds}
    return Rounds(**{**usual, **{key: value for key, value in said.items() if value is not None}})


def single(arguments: Namespace, name: str, argument: str) -> dict[str, Any]:
    """The one value of a list that a mode takes once."""
    values = arguments[name] or []
    if len(values) > 1:
        raise ConfigError(f"--{name} takes one value here; got {len(values)}.")
    return {argument: values[0]} if values else {}


# -- the four modes ------------------------------------------------------------------------------


def run_models(arguments: Namespace, watch: Callable[[str], None]) -> tuple[Finding, dict[str, Any]]:
    from mixlab.evals.cost.bench import bench as run

    options = given(arguments, "batches", "dtypes", "optimizer", "layout", "threads", "against", "device", "skip")
    options |= {"sizes": [parse_size(size) for size in arguments.sizes]} if arguments.sizes else {}
    options |= changes_of(arguments)
    flags = {"training": arguments.training, "compiled": arguments.compile}
    return run(arguments.models, **options, **flags, plan=plan_of(arguments), watch=watch)


def run_mixers(arguments: Namespace, watch: Callable[[str], None]) -> tuple[Finding, dict[str, Any]]:
    from mixlab.evals.cost.bench_mixers import GLOBAL, MixerConditions, bench_mixers

    options = given(arguments, "lengths", "dim", "device", "threads", "limit_seconds")
    options |= single(arguments, "batches", "batch") | single(arguments, "dtypes", "dtype")
    usual = {"seconds": MixerConditions.plan.seconds, "least": MixerConditions.plan.least}
    entries = [mixer_entry(text) for text in arguments.mixers] or list(GLOBAL)
    return bench_mixers(entries, **options, plan=plan_of(arguments, **usual), watch=watch)


def mixer_entry(text: str) -> Any:
    """NAME, or NAME:KEY=VALUE,KEY=VALUE."""
    name, mark, options = text.partition(":")
    return {"name": name, **pairs(options.split(","), "--mixers NAME:")} if mark else name


def run_activations(arguments: Namespace, watch: Callable[[str], None]) -> tuple[Finding, dict[str, Any]]:
    from mixlab.evals.cost.bench_activations import bench_activations

    options = given(arguments, "units", "device", "threads") | single(arguments, "dtypes", "dtype")
    flags = {"training": arguments.training, "compiled": arguments.compile}
    plan = plan_of(arguments, least=20)
    return bench_activations(arguments.activations, **options, **flags, plan=plan, watch=watch)


def run_compute(arguments: Namespace, watch: Callable[[str], None]) -> tuple[Finding, dict[str, Any]]:
    from mixlab.evals.cost.compute import compute_of_recipes, macs_against_resolution
    from mixlab.evals.cost.phases import recipes_of

    if arguments.recipe is None:
        said = changes_of(arguments)
        said |= {"sizes": [parse_size(size) for size in arguments.sizes]} if arguments.sizes else {}
        return macs_against_resolution(arguments.models, **said, watch=watch)
    if arguments.sizes:
        raise ConfigError("--sizes does not go with --recipe, which has an image size of its own.")
    options = given(arguments, "images", "tflops") | changes_of(arguments)
    options |= {} if arguments.drop_path is None else {"form": arguments.drop_path}
    recipes = recipes_of(arguments.models, arguments.recipe)
    return compute_of_recipes(arguments.models, recipes, **options)


RUNS = {"models": run_models, "mixers": run_mixers, "activations": run_activations, "compute": run_compute}


# -- for people ----------------------------------------------------------------------------------


def for_people(found: Finding) -> Finding:
    """Without columns that are empty or the same in every row."""
    kept = [index for index, name in enumerate(found.columns) if not is_dull(name, column(found, index))]
    table = tuple(tuple(row[index] for index in kept) for row in found.table)
    return replace(found, columns=tuple(found.columns[index] for index in kept), table=table)


def column(found: Finding, index: int) -> list[Cell]:
    return [row[index] for row in found.table]


def is_dull(name: str, values: Sequence[Cell]) -> bool:
    return all(value in (None, "") for value in values) or (name in CONSTANTS and len(set(values)) == 1)


def print_below(found: Finding) -> None:
    """What all rows have in common, and the exponents of mixers."""
    if "scaling" in found.data:
        print()
        titles = ("mixer", "exponent of time", "of MACs", "of Fourier transforms (N log N)", "their share of MACs")
        rows = [
            [str(one["mixer"]), *(show_cell(one[key]) for key in ("time", "macs", "fourier", "logarithmic"))]
            for one in found.data["scaling"]
        ]
        show(titles, rows, right=(1, 2, 3, 4))
    shared = {name: column(found, index) for index, name in enumerate(found.columns) if name in CONSTANTS}
    same = {name: values[0] for name, values in shared.items() if len(set(values)) == 1 and values[0] != ""}
    told = [f"{name} {show_cell(value)}" for name, value in same.items()]
    if told:
        print(f"all rows: {', '.join(told)}")
