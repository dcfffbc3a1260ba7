"""`mixlab models` and `mixlab info`."""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from rich.progress import track

from mixlab.cli.printing import billions, parse_size, show, wide_open, with_frozen
from mixlab.core.errors import ConfigError, near_misses

# -- mixlab models -------------------------------------------------------------------------------


def models_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="List the models: parameters (behind a plus: frozen ones) and multiply-accumulates as counted here "
        "at each model's own image size, ImageNet-1K top-1 as the paper reports it."
    )
    parser.add_argument("pattern", nargs="?", default="*", help="a name or shell pattern, such as 'convformer*'")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.add_argument(
        "--chart", metavar="FILE", default=None, help="a .png or .svg: the papers' top-1 against the models' costs"
    )
    parser.add_argument(
        "--measure", action="store_true", help="with --chart: measure images/s of each model on this CPU now"
    )
    parser.add_argument("--batch", type=int, default=None, help="with --measure: images at once; default: 1")
    parser.add_argument(
        "--limit-seconds",
        type=float,
        default=None,
        help="with --measure: begin no measurement after so many seconds in all; default: 600",
    )
    parser.add_argument(
        "--measured", metavar="FILE", default=None, help="with --chart: images/s from a bench.json of `mixlab bench`"
    )
    return parser


def models(arguments: Namespace) -> None:
    """List the models with their sizes and costs."""
    check_chart_arguments(arguments)
    if arguments.chart is not None:
        draw_chart(arguments)
    list_all(arguments)


def list_all(arguments: Namespace) -> None:
    from mixlab.evals.cost.summary import summarise
    from mixlab.models.zoo import list_models

    names = list_models(arguments.pattern)
    if not names:
        raise ConfigError(f"No model matches {arguments.pattern!r}. {near_misses(arguments.pattern, list_models())}")
    console = Console(stderr=True)
    summaries = [
        summarise(name) for name in track(names, "Counting", console=console, transient=True, disable=not wide_open())
    ]
    if arguments.json:
        print(json.dumps([asdict(summary) for summary in summaries], indent=1))
        return
    rows = [
        (
            one.name,
            one.family,
            mixers_in_short(one.mixers),
            f"{one.image_size[0]}",
            with_frozen(one.params, one.frozen, 1),
            billions(one.macs),
            "" if one.paper_top1 is None else f"{one.paper_top1:.1f}",
        )
        for one in summaries
    ]
    show(("model", "family", "mixers", "px", "params M", "MACs G", "paper top-1"), rows, right=(3, 4, 5, 6))


def check_chart_arguments(arguments: Namespace) -> None:
    """Before long work: the picture can be written, and every option has an effect."""
    from mixlab.findings.findings import check_picture_file

    if arguments.chart is not None:
        check_picture_file(arguments.chart)
    elif arguments.measure or arguments.measured is not None:
        raise ConfigError("--measure and --measured are for a chart: add --chart FILE.png.")
    if arguments.measure and arguments.measured is not None:
        raise ConfigError("Give --measure or --measured, not both: the chart shows images/s of one machine.")
    if not arguments.measure and (arguments.batch is not None or arguments.limit_seconds is not None):
        raise ConfigError("--batch and --limit-seconds are for --measure: add it, or leave them out.")


def draw_chart(arguments: Namespace) -> None:
    """The papers' accuracies against costs; what is measured is told as it comes."""
    from mixlab.evals.cost.reported import measure_speeds, points_of, read_speeds, with_speeds
    from mixlab.evals.cost.reported_figure import draw_reported
    from mixlab.findings.findings import check_picture_file, write_figure

    points, label = points_of(arguments.pattern), "images/s"
    if arguments.measure:
        given = {"batch": arguments.batch, "limit_seconds": arguments.limit_seconds}
        options = {name: value for name, value in given.items() if value is not None}
        points = with_speeds(points, measure_speeds(points, tell=tell, **options))
        label = f"images/s on this CPU, batch {arguments.batch or 1}"
    elif arguments.measured is not None:
        points = with_speeds(points, read_speeds(arguments.measured, points))
        label = "images/s of the best batch measured"
    path = check_picture_file(arguments.chart)
    write_figure(draw_reported(points, speed_label=label), path)
    tell(f"written: {path}")


def tell(text: str) -> None:
    """What goes on, beside the output for programs."""
    print(text, file=sys.stderr, flush=True)


def mixers_in_short(names: Iterable[str]) -> str:
    """Equal mixers in a row are named once."""
    listed = list(names)
    return " ".join(name for index, name in enumerate(listed) if index == 0 or listed[index - 1] != name)


# -- mixlab info ---------------------------------------------------------------------------------


def info_parser() -> ArgumentParser:
    parser = ArgumentParser(description="Show a model stage by stage: shapes, parameters and multiply-accumulates.")
    parser.add_argument("name", help="a model name from `mixlab models`")
    parser.add_argument("--image-size", default=None, help="a side such as 384, or HEIGHTxWIDTH; default: the model's")
    parser.add_argument(
        "--mixers", default=None, help="other mixers: a name for all stages, or pool,sepconv,... per stage"
    )
    parser.add_argument("--num-classes", type=int, default=None, help="default: the model's, mostly 1000")
    parser.add_argument("--engine", action="store_true", help="what runs as kernels on this CPU, and what as PyTorch")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    return parser


def engine_info(name: str, changes: dict[str, Any], *, as_json: bool) -> None:
    """Print what runs where in a model, for one image, and why not elsewhere."""
    from mixlab.models.zoo import create_model, ensemble_row

    if ensemble_row(name) is not None:
        raise ConfigError(f"{name!r} is an ensemble: ask for the engine's part in one of its members.")
    report = create_model(name, **changes).eval().engine_report()
    print(json.dumps(report.plain(), indent=1) if as_json else report)


def info(arguments: Namespace) -> None:
    """Show one model stage by stage."""
    from mixlab.evals.cost.summary import describe_member, describe_parts
    from mixlab.models.zoo import ensemble_row, model_config

    changes: dict[str, Any] = {}
    if arguments.mixers:
        names = arguments.mixers.split(",")
        changes["mixers"] = names if len(names) > 1 else names[0]
    if arguments.num_classes is not None:
        changes["num_classes"] = arguments.num_classes
    if arguments.image_size is not None:
        changes["image_size"] = parse_size(arguments.image_size)
    if arguments.engine:
        return engine_info(arguments.name, changes, as_json=arguments.json)
    ensemble = ensemble_row(arguments.name)
    if ensemble is None:
        config = model_config(arguments.name, **changes)
        height, width = config.image_size
        parts = describe_parts(config, (height, width))
    else:
        config = model_config(ensemble.members[0], **changes)
        height, width = config.image_size
        parts = [describe_member(model_config(member, **changes), (height, width)) for member in ensemble.members]
    named = ensemble or config
    if arguments.json:
        reported = [asdict(row) for row in named.reported]
        about = {"name": named.name, "family": named.family, "paper": named.paper, "image_size": [height, width]}
        mixers = [choice.plain() for choice in config.mixers]
        about |= {"mixers": mixers} if ensemble is None else {"members": ensemble.members}
        print(json.dumps({**about, "reported": reported, "parts": [asdict(part) for part in parts]}, indent=1))
        return
    rows = [
        (
            part.part,
            part.content,
            " x ".join(str(side) for side in part.output),
            "" if part.stride is None else str(part.stride),
            with_frozen(part.params, part.frozen, 3),
            billions(part.macs, 3),
        )
        for part in parts
    ]
    total = with_frozen(sum(part.params for part in parts), sum(part.frozen for part in parts), 3)
    rows.append(("total", "", "", "", total, billions(sum(part.macs for part in parts), 3)))
    print(f"{named.name} ({named.paper}) at {height} x {width} px")
    show(("part", "content", "output", "stride", "params M", "MACs G"), rows, right=(3, 4, 5))
    for row in named.reported:
        told = [f"{row.params:g}M params" if row.params else "", f"{row.macs:g}G MACs" if row.macs else ""]
        told += [f"top-1 {row.top1:g}%" if row.top1 else "", f"after {row.pretraining}" if row.pretraining else ""]
        print(f"reported, {row.table}, {row.image_size} px: {', '.join(part for part in told if part)}")
