"""How good trained weights are on a split of a dataset, and what they say about single images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch

from mixlab.core.errors import DataError
from mixlab.core.processes import processes
from mixlab.data.images import decode
from mixlab.data.loader import Loader
from mixlab.data.open import open_data
from mixlab.data.transforms import eval_transform
from mixlab.models.config import parse_image_size
from mixlab.models.model import Model
from mixlab.models.zoo import create_model
from mixlab.training.tasks.classification import CROPS, accuracy, best_crop

Weights = str | PathLike[str] | Model


def evaluate(
    model: Weights,
    data: str | PathLike[str],
    *,
    split: str = "val",
    image_size: int | None = None,
    crop: float | None = None,
    search_crop: bool = False,
    batch: int = 64,
    workers: int = 2,
    device: str = "auto",
    watch: Callable[[int], None] | None = None,
) -> dict[str, float]:
    """Top-1, top-5 and cross-entropy of a model or weight file on a split.

    `search_crop` takes the best crop ratio between 0.8 and 1.0 for the top-1 on this very split, and the result says so
    (`crop`, `crop_searched`).
    """
    source = open_data(data, split)  # type: ignore[arg-type]
    with processes(device) as own:
        backbone = (model if isinstance(model, Model) else create_model(weights=model)).to(own.device)
        check_classes(backbone, source.class_names, str(data))
        settings = backbone.config.preprocessing
        size = backbone.config.evaluation_size if image_size is None else parse_image_size(image_size)

        def at(ratio: float) -> dict[str, float]:
            transform = eval_transform(size, settings, backbone.config.in_channels, ratio, settings.interpolation)
            loader = Loader(
                source,
                transform,
                batch_size=batch,
                train=False,
                seed=0,
                workers=workers,
                rank=own.rank,
                world=own.world,
            )
            return accuracy(backbone, loader, own, watch)

        was_training = backbone.training
        backbone.eval()
        with torch.inference_mode():
            ratio = settings.crop if crop is None else crop
            found = best_crop(at, CROPS) if search_crop else (ratio, at(ratio))
        backbone.train(was_training)
    return {**found[1], "crop": found[0], "crop_searched": float(search_crop)}


def check_classes(model: Model, names: Sequence[str], data: str) -> None:
    classes = model.config.num_classes
    if classes != len(names):
        raise DataError(f"The model tells {classes} classes apart; {data} has {len(names)}.")
    if model.class_names and tuple(model.class_names) != tuple(names):
        different = [
            f"{ours!r} / {theirs!r}" for ours, theirs in zip(model.class_names, names, strict=True) if ours != theirs
        ]
        raise DataError(
            f"The classes of {data} are not those that the model was trained on, in the same order: "
            f"{', '.join(different[:5])}."
        )


@dataclass(frozen=True)
class Prediction:
    """The most likely classes of an image, with their probabilities."""

    image: str
    classes: tuple[str, ...]
    probabilities: tuple[float, ...]


def predict(
    model: Weights, images: Sequence[str | PathLike[str]], *, top: int = 5, image_size: int | None = None
) -> list[Prediction]:
    """What a model sees in image files."""
    backbone = (model if isinstance(model, Model) else create_model(weights=model)).eval()
    paths = image_paths(images)
    settings = backbone.config.preprocessing
    size = backbone.config.evaluation_size if image_size is None else parse_image_size(image_size)
    transform = eval_transform(size, settings, backbone.config.in_channels, settings.crop, settings.interpolation)
    names = backbone.class_names or tuple(str(index) for index in range(backbone.config.num_classes))
    found = []
    with torch.inference_mode():
        for path in paths:
            chances = backbone(transform(decode(path))[None]).softmax(-1)[0]
            values, places = chances.topk(min(top, len(chances)))
            classes = tuple(names[place] for place in places.tolist())
            found.append(Prediction(str(path), classes, tuple(values.tolist())))
    return found


def image_paths(images: Sequence[str | PathLike[str]]) -> list[Path]:
    """All of them are there, or none is looked at."""
    paths = [Path(image) for image in images]
    for path in paths:
        if not path.is_file():
            raise DataError(f"The image {path} {'is a folder' if path.is_dir() else 'does not exist'}.")
    return paths
