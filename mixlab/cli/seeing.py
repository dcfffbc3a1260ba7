"""`mixlab erf`, `resolution` and `disagree`: what models see, at which sizes, and where they differ."""

from jsonargparse import ArgumentParser, Namespace

from mixlab.cli.findings import add_output_arguments, check_out, put_out
from mixlab.cli.printing import parse_size
from mixlab.cli.progress import progress

MODELS = "names, weight files, NAME=WEIGHTS, timm:NAME, timm:NAME=WEIGHTS"
DATA = "digits, cifar10:PATH, a folder, a list, shards, ..."


def erf_parser() -> ArgumentParser:
    from mixlab.evals.inspect.erf import PARTS
    from mixlab.evals.inspect.erf_gallery import SCALES

    parser = ArgumentParser(
        description="Effective receptive fields: which pixels the center of a feature map listens to. Example: "
        "mixlab erf sequencer2d_pico convformer_pico timm:resnet18 --data digits --image-size 96 --at all-stages "
        "--out erf"
    )
    parser.add_argument("models", nargs="+", help=MODELS)
    parser.add_argument("--data", default=None, help=DATA)
    parser.add_argument("--split", default="val", choices=["train", "val", "test"])
    parser.add_argument("--count", type=int, default=50, help="images of the dataset, spread over the split")
    parser.add_argument("--images", nargs="+", default=[], help="image files, instead of --data")
    parser.add_argument("--image-size", default=None, help="384 or 384x256; default: each model's own")
    parser.add_argument(
        "--at",
        nargs="+",
        default=["last"],
        help="first, last, all-stages, all-blocks, first-and-last, or names such as stages.0.blocks.1; of a timm "
        "model any of its modules, such as layer1.0 of a ResNet",
    )
    parser.add_argument("--part", default="positive", choices=PARTS, help="of the gradient; the paper's is positive")
    parser.add_argument("--scale", default="together", choices=list(SCALES), help="which pictures share their colors")
    parser.add_argument("--batch", type=int, default=4, help="images at once")
    parser.add_argument("--seed", type=int, default=0, help="of fresh weights")
    parser.add_argument("--device", default="auto")
    add_output_arguments(parser)
    return parser


def erf(arguments: Namespace) -> None:
    """See which pixels the center of a feature map listens to."""
    from mixlab.evals.inspect.erf_gallery import receptive_fields

    check_out(arguments)
    size = None if arguments.image_size is None else parse_size(arguments.image_size)
    names = ("data", "split", "count", "images", "at", "part", "scale", "batch", "seed", "device")
    with progress("Receptive fields") as bar:
        options = {name: arguments[name] for name in names}
        found, figures = receptive_fields(arguments.models, **options, image_size=size, watch=bar.advance)
    put_out(found, arguments, figures)


def resolution_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Accuracy, speed and memory at sizes that models were not trained at, without fine-tuning. "
        "Example: mixlab resolution runs/a/final.safetensors timm:resnet18=w.pth DATA --sizes 160 224 288 --out sizes"
    )
    parser.add_argument("models", nargs="+", help=MODELS)
    parser.add_argument("data", help=DATA)
    parser.add_argument("--sizes", nargs="+", required=True, help="such as 160 224 384 or 224x320")
    parser.add_argument(
        "--step",
        default=None,
        help="round the sizes to multiples of so many pixels, or own: of each model's own step, at which it pads "
        "nothing (28 for Sequencer, 32 for others at 224 px)",
    )
    parser.add_argument("--split", default="val", choices=["train", "val", "test"])
    parser.add_argument(
        "--crop", type=float, default=None, help="share of the resized image; default: each model's own"
    )
    parser.add_argument("--batch", type=int, default=16, help="images at once, also for speed and memory")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement of speed; 0: none")
    parser.add_argument("--no-memory", action="store_true", help="leave peak memory out")
    parser.add_argument("--seed", type=int, default=0, help="of fresh weights")
    parser.add_argument("--device", default="auto")
    add_output_arguments(parser)
    return parser


def resolution(arguments: Namespace) -> None:
    """Measure accuracy, speed and memory over image sizes."""
    from mixlab.evals.quality.resolution import resolution as run

    check_out(arguments)
    sizes = [parse_size(size) for size in arguments.sizes]
    names = ("step", "split", "crop", "batch", "workers", "seconds", "seed", "device")
    with progress("Resolution") as bar:
        options = {name: arguments[name] for name in names}
        memory = not arguments.no_memory
        found, figures = run(arguments.models, arguments.data, sizes=sizes, memory=memory, watch=bar.advance, **options)
    put_out(found, arguments, figures)


def disagree_parser() -> ArgumentParser:
    from mixlab.models.ensemble import AVERAGES

    parser = ArgumentParser(
        description="Errors that models do not have in common, and the accuracy of their ensembles. Example: "
        "mixlab disagree runs/a/final.safetensors runs/b/final.safetensors digits --split test --average logits"
    )
    parser.add_argument("models", nargs="+", help=f"two or more: {MODELS}")
    parser.add_argument("data", help=DATA)
    parser.add_argument("--split", default="val", choices=["train", "val", "test"])
    parser.add_argument(
        "--average",
        default="logits",
        choices=AVERAGES,
        help="what an ensemble averages: the models' logits (as HyenaPixel's authors do), or their probabilities, "
        "which gives every model the same weight however large its logits are",
    )
    parser.add_argument("--batch", type=int, default=64, help="images at once")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of fresh weights")
    parser.add_argument("--device", default="auto")
    add_output_arguments(parser)
    return parser


def disagree(arguments: Namespace) -> None:
    """Find the errors that models do not have in common."""
    from mixlab.evals.quality.disagreement import disagreement

    check_out(arguments)
    names = ("split", "average", "batch", "workers", "seed", "device")
    with progress("Reading answers") as bar:
        options = {name: arguments[name] for name in names}
        found, figures = disagreement(arguments.models, arguments.data, watch=bar.advance, **options)
    put_out(found, arguments, figures)
