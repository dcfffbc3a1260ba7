"""The `mixlab` command: each verb reads its arguments, calls one function and prints."""

import os
import sys
from collections.abc import Callable, Sequence

from jsonargparse import ArgumentParser, Namespace

from mixlab.cli import (
    bench,
    data,
    deploying,
    doctor,
    inside,
    reporting,
    robustness,
    seeing,
    serving,
    training,
    using,
    zoo,
)
from mixlab.core.errors import MixlabError, StoppedEarly
from mixlab.core.version import VERSION

Verb = tuple[Callable[[Namespace], int | None], Callable[[], ArgumentParser]]
VERBS: dict[str, Verb] = {
    "models": (zoo.models, zoo.models_parser),
    "info": (zoo.info, zoo.info_parser),
    "train": (training.train, training.train_parser),
    "finetune": (training.finetune, training.finetune_parser),
    "eval": (using.evaluate, using.evaluate_parser),
    "predict": (using.predict, using.predict_parser),
    "compare": (training.compare, training.compare_parser),
    "transfer": (training.transfer, training.transfer_parser),
    "robustness": (robustness.robustness, robustness.robustness_parser),
    "resolution": (seeing.resolution, seeing.resolution_parser),
    "disagree": (seeing.disagree, seeing.disagree_parser),
    "erf": (seeing.erf, seeing.erf_parser),
    "look": (inside.look, inside.look_parser),
    "kernels": (inside.kernels, inside.kernels_parser),
    "truncate": (inside.truncate, inside.truncate_parser),
    "bench": (bench.bench, bench.bench_parser),
    "report": (reporting.report, reporting.report_parser),
    "optimize": (deploying.optimize, deploying.optimize_parser),
    "export": (deploying.export, deploying.export_parser),
    "serve": (serving.serve, serving.serve_parser),
    "data": (data.data, data.data_parser),
    "recipes": (data.recipes, data.recipes_parser),
    "doctor": (doctor.doctor, doctor.doctor_parser),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; the exit code is 0, 2 for a user's error, 130 after Ctrl-C."""
    parser = build_parser()
    parsed = parser.parse_args(arguments)
    try:
        code = VERBS[parsed.verb][0](parsed[parsed.verb])
        sys.stdout.flush()
        return code or 0
    except MixlabError as error:
        print(f"mixlab: {error}", file=sys.stderr)
        return 130 if isinstance(error, StoppedEarly) else 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # such as a full disk behind the output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"mixlab: {error}", file=sys.stderr)
        return 1
    return 0


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="mixlab", description="Vision backbones whose token mixer is a choice.", version=VERSION
    )
    subcommands = parser.add_subcommands(dest="verb", metavar="VERB")
    for name, (function, describe) in VERBS.items():
        subcommands.add_subcommand(name, describe(), help=(function.__doc__ or "").splitlines()[0])
    return parser
