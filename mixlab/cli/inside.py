"""`mixlab kernels`, `truncate` and `look`: inside the model."""

from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from mixlab.cli.arguments import need
from mixlab.cli.findings import add_output_arguments, check_out, put_out
from mixlab.cli.printing import parse_size
from mixlab.cli.progress import progress
from mixlab.core.errors import ConfigError, require

if TYPE_CHECKING:
    from mixlab.evals.subjects import Subject

MODEL = "a model, NAME=WEIGHTS or a weight file"


def add_model_arguments(parser: ArgumentParser, model: str, *, several: bool = False) -> None:
    if several:
        parser.add_argument("models", nargs="+", help=model)
    else:
        parser.add_argument("model", help=model)
    parser.add_argument("--image-size", default=None, help="a side or HEIGHTxWIDTH; default: the model's own")
    parser.add_argument("--member", type=int, default=None, help="of an ensemble, from 0")


def subject_of(arguments: Namespace, model: str | None = None) -> "Subject":
    """The model that was asked for, or one of several, or one member of it."""
    from mixlab.evals.subjects import of_backbone, open_subject
    from mixlab.models.ensemble import Ensemble

    check_out(arguments)
    size = None if arguments.image_size is None else parse_size(arguments.image_size)
    subject = open_subject(arguments.model if model is None else model, image_size=size)
    if arguments.member is None:
        return subject
    if not isinstance(subject.model, Ensemble):
        raise ConfigError(f"{subject.name!r} is a single model: leave out --member.")
    members = subject.model.members
    require(0 <= arguments.member < len(members), f"a member from 0 to {len(members) - 1}; got {arguments.member}.")
    member = members[arguments.member]
    return of_backbone(member.config.name, member, size, trained=subject.trained)


def kernels_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="The kernels that models have learned, and how far they reach; several models share a picture of "
        "the latter. Example: mixlab kernels run/final.safetensors --out kernels"
    )
    add_model_arguments(parser, f"{MODEL}, one or more", several=True)
    parser.add_argument(
        "--block", default=None, help="of one model: draw its channels one by one, such as stages.0.blocks.1"
    )
    add_output_arguments(parser)
    return parser


def kernels(arguments: Namespace) -> None:
    """Show the kernels that models have learned and how far they reach."""
    from mixlab.evals.inspect.kernel_coverage import compare_coverage
    from mixlab.evals.inspect.kernels import look_at_kernels

    subjects = [subject_of(arguments, model) for model in arguments.models]
    if len(subjects) == 1:
        put = look_at_kernels(subjects[0], block=arguments.block)
    else:
        require(arguments.block is None, f"one model for --block; got {len(subjects)}.")
        put = compare_coverage(subjects)
    put_out(put[0], arguments, put[1])


def truncate_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Accuracy when the kernels of one stage at a time are cut. "
        "Example: mixlab truncate run/final.safetensors digits --out truncate"
    )
    add_model_arguments(parser, MODEL)
    parser.add_argument("data", help="digits, cifar10:PATH, a folder, a list, shards, ...")
    parser.add_argument("--shares", nargs="*", type=float, default=None, help="of the kernel's size that are kept")
    parser.add_argument("--stages", nargs="*", type=int, default=None, help="default: every stage with kernels")
    parser.add_argument("--split", default="val", choices=["train", "val", "test"])
    parser.add_argument("--images", type=int, default=None, help="only so many, spread over the split")
    parser.add_argument("--batch", type=int, default=64, help="images at once")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="auto")
    add_output_arguments(parser)
    return parser


def truncate(arguments: Namespace) -> None:
    """Measure accuracy with truncated kernels."""
    from mixlab.evals.inspect.truncation import SHARES, truncation_curves

    names = ("stages", "split", "images", "batch", "workers", "device")
    settings: dict[str, Any] = {name: arguments[name] for name in names}
    shares = SHARES if arguments.shares is None else arguments.shares
    with progress("Truncating") as bar:
        found, figures = truncation_curves(
            subject_of(arguments), arguments.data, shares=shares, watch=bar.reach, **settings
        )
    put_out(found, arguments, figures)


def look_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Pictures of what a model sees: attention, gates, Grad-CAM, integrated gradients, feature maps. "
        "Example: mixlab look run/final.safetensors cat.jpg --out look"
    )
    add_model_arguments(parser, f"{MODEL}, or timm:NAME for gradcam, gradients and features")
    parser.add_argument("images", nargs="+", help="image files")
    parser.add_argument(
        "--what",
        nargs="*",
        default=None,
        help="gradcam, gradients, attention, gates, features; default: gradcam and what the model can explain",
    )
    parser.add_argument(
        "--block",
        default=None,
        help="single heads or channels of a place, such as stages.3.blocks.0 (layer4.2 of timm:resnet50)",
    )
    parser.add_argument("--target", default=None, help="a class by name or number; default: what the model says")
    parser.add_argument("--query", default=None, help="whose attention: DOWN,RIGHT as shares, such as 0.5,0.5")
    parser.add_argument("--steps", type=int, default=50, help="of integrated gradients")
    add_output_arguments(parser)
    return parser


def look(arguments: Namespace) -> None:
    """Draw what a model sees in images."""
    from mixlab.evals.inspect.look import look_at

    need(arguments, "out")
    names = ("what", "block", "target", "steps")
    settings: dict[str, Any] = {name: arguments[name] for name in names}
    with progress("Looking") as bar:
        found, figures = look_at(
            subject_of(arguments), arguments.images, query=parse_place(arguments.query), watch=bar.reach, **settings
        )
    put_out(found, arguments, figures)


def parse_place(text: str | None) -> tuple[float, float] | None:
    """'0.5,0.25' as (0.5, 0.25)."""
    if text is None:
        return None
    try:
        down, right = (float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"A query is DOWN,RIGHT as shares of the image, such as 0.5,0.5; got {text!r}.") from None
    return down, right
