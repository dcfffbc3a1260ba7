"""`mixlab eval` and `predict`."""

import json
from dataclasses import asdict
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from mixlab.cli.arguments import dense_scores, need
from mixlab.cli.printing import show
from mixlab.core.errors import ConfigError

# which arguments belong to which task; the others are shared
FOR = {
    "classification": {"crop", "search_crop", "top", "image_size"},
    "segmentation": {"mode", "window", "stride", "image_size", "out"},
    "detection": {"threshold", "out"},
}


def checked_task(arguments: Namespace) -> str:
    """The task of the weights; what was given for another one is an error."""
    from mixlab.dense.files import task_of

    task = task_of(arguments.weights)
    if arguments.task is not None and arguments.task != task:
        raise ConfigError(f"{arguments.weights} is for {task}, not for {arguments.task}.")
    special = set().union(*FOR.values()) - FOR[task]
    given = [name for name in sorted(special) if arguments.get(name)]
    if given:
        told = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"{arguments.weights} is for {task}, which has no {told}.")
    return task


def evaluate_parser() -> ArgumentParser:
    parser = ArgumentParser(description="Accuracy of a weight file that `mixlab train` or save_weights wrote.")
    parser.add_argument("weights", help="a .safetensors file with its config inside")
    parser.add_argument("data", help="digits, cifar10:PATH, a folder, a list, shards, ...")
    parser.add_argument("--task", default=None, choices=list(FOR), help="what the weights must be for")
    parser.add_argument("--split", default="val", choices=["train", "val", "test"])
    parser.add_argument("--image-size", type=int, default=None, help="default: the model's own")
    parser.add_argument("--crop", type=float, default=None, help="share of the resized image; default: the model's own")
    parser.add_argument("--search-crop", action="store_true", help="the best crop between 0.8 and 1.0 on this split")
    parser.add_argument("--mode", default=None, choices=["whole", "sliding", "multiscale"], help="of segmenters")
    parser.add_argument("--window", type=int, default=None, help="of segmenters; default: the size of training crops")
    parser.add_argument("--stride", type=int, default=None, help="of the window; default: two thirds of it")
    parser.add_argument("--batch", type=int, default=None, help="images at once; default: 64, and 4 for detectors")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    return parser


def evaluate(arguments: Namespace) -> None:
    """Measure the accuracy of trained weights."""
    from mixlab.evals.quality.accuracy import evaluate as run

    task = checked_task(arguments)
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
    from mixlab.evals.quality.dense import evaluate_dense as run

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
    parser.add_argument("--task", default=None, choices=list(FOR), help="what the weights must be for")
    parser.add_argument("--top", type=int, default=None, help="classes per image; default: 5")
    parser.add_argument("--out", default=None, help="a folder for pictures with masks and boxes drawn onto them")
    parser.add_argument("--threshold", type=float, default=None, help="the least score of objects; default: 0.5")
    parser.add_argument("--image-size", type=int, default=None, help="default: the model's own")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    return parser


def predict(arguments: Namespace) -> None:
    """Name what images show."""
    from mixlab.evals.quality.accuracy import predict as run

    if checked_task(arguments) != "classification":
        return predict_dense(arguments)
    found = run(arguments.weights, arguments.images, top=arguments.top or 5, image_size=arguments.image_size)
    if arguments.json:
        print(json.dumps([asdict(one) for one in found], indent=1))
        return
    for one in found:
        told = zip(one.classes, one.probabilities, strict=True)
        print(f"{one.image}: " + ", ".join(f"{name} {100 * chance:.1f}%" for name, chance in told))


def predict_dense(arguments: Namespace) -> None:
    from mixlab.evals.quality.dense import predict_dense as run

    need(arguments, "out")
    threshold = 0.5 if arguments.threshold is None else arguments.threshold
    found = run(arguments.weights, arguments.images, out=arguments.out, threshold=threshold)
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    for one in found:
        shares = [f"{name} {100 * share:.1f}%" for name, share in one.get("classes", {}).items()]
        objects = [f"{row['class']} {100 * row['score']:.0f}%" for row in one.get("objects", [])]
        print(f"{one['image']}: {', '.join(shares + objects) or 'nothing'}; drawn in {one['picture']}")
