"""How good a segmenter or detector is on a split, and what it sees in single images."""

from collections import Counter
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mixlab.core.errors import DataError
from mixlab.core.processes import processes
from mixlab.data.dense import Annotated, Objects
from mixlab.data.images import decode
from mixlab.data.kinds import Array
from mixlab.data.loader import Loader
from mixlab.data.object_transforms import Target, eval_object_transform, restored
from mixlab.data.open_dense import open_dense
from mixlab.dense.detector import DetectorConfig
from mixlab.dense.files import load_dense
from mixlab.dense.segmentation import evaluate_segmentation, segment
from mixlab.dense.segmenter import Segmenter
from mixlab.evals.quality.accuracy import image_paths
from mixlab.findings.drawing import draw_mask, draw_objects
from mixlab.models.dense_model import DenseModel
from mixlab.training.tasks.detection import precision


def evaluate_dense(
    model: str | PathLike[str] | DenseModel,
    data: str | PathLike[str],
    *,
    split: str = "val",
    batch: int = 4,
    workers: int = 2,
    device: str = "auto",
    watch: Callable[[int], None] | None = None,
    **inference: Any,
) -> dict[str, Any]:
    """mIoU and a row per class of a segmenter, average precision of a detector.

    `inference` is for segmenters: mode ("whole", "sliding" or "multiscale"), window, stride, scales, flip, short_side.
    """
    with processes(device) as own:
        ready = (model if isinstance(model, DenseModel) else load_dense(model)).to(own.device)
        source: Any = open_dense(data, split, ready.task)
        check_classes(ready, source.class_names, str(data))
        if isinstance(ready, Segmenter):
            return evaluate_segmentation(ready, source, processes=own, watch=watch, **inference)
        if inference:
            raise DataError(f"A detector has no {', '.join(sorted(inference))}: these are for segmenters.")
        where = {"rank": own.rank, "world": own.world, "workers": workers}
        loader = Loader(source, detection_transform(ready), batch_size=batch, train=False, seed=0, **where)
        found = precision(ready, loader, watch)
        return {**found, "images": len(source) - len(loader.unreadable), "unreadable": len(loader.unreadable)}


def check_classes(model: DenseModel, names: Sequence[str], data: str) -> None:
    if model.config.num_classes != len(names):
        raise DataError(f"The model tells {model.config.num_classes} classes apart; {data} has {len(names)}.")
    if model.class_names and tuple(model.class_names) != tuple(names):
        raise DataError(f"The classes of {data} are not those that the model was trained on, in the same order.")


def detection_transform(model: DenseModel) -> Callable[[Annotated], Any]:
    """Images as the detector is evaluated on them."""
    assert isinstance(model.config, DetectorConfig)
    settings = model.backbone.config
    sizes = (model.config.shorter, model.config.longer)
    return eval_object_transform(*sizes, settings.preprocessing, settings.in_channels)


# -- single images -------------------------------------------------------------------------------


def predict_dense(
    model: str | PathLike[str] | DenseModel,
    images: Sequence[str | PathLike[str]],
    *,
    out: str | PathLike[str],
    threshold: float = 0.5,
) -> list[dict[str, Any]]:
    """What a model sees in image files, drawn onto them: one PNG per image in the folder `out`, and the same as data.

    `threshold` is the least score of an object to be drawn and listed.
    """
    ready = (model if isinstance(model, DenseModel) else load_dense(model)).eval()
    paths, folder = image_paths(images), Path(out)
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file; pictures go into a folder.")
    places = picture_names(paths, folder)
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for path, place in zip(paths, places, strict=True):
        image = decode(path)
        picture, told = seen_pixels(ready, image) if isinstance(ready, Segmenter) else seen(ready, image, threshold)
        picture.save(place)
        found.append({"image": str(path), "picture": str(place), **told})
    return found


def picture_names(paths: Sequence[Path], folder: Path) -> list[Path]:
    """A name of its own for every picture, none of them that of an image."""
    seen: Counter[str] = Counter()
    places = []
    for path in paths:
        seen[path.stem] += 1
        places.append(folder / (f"{path.stem}-{seen[path.stem]}.png" if seen[path.stem] > 1 else f"{path.stem}.png"))
    taken = {path.resolve() for path in paths} & {place.resolve() for place in places}
    if taken:
        raise DataError(f"The picture of {min(taken)} would replace the image itself: choose another folder for --out.")
    return places


def seen_pixels(model: Segmenter, image: Image.Image) -> tuple[Image.Image, dict[str, Any]]:
    """The picture, and the share of every class that is in it."""
    mask, names = segment(model, image), names_of(model)
    shares = {names[number]: share for number, share in class_shares(mask, len(names)).items()}
    return draw_mask(image, mask, names), {"classes": shares}


def class_shares(mask: Array, classes: int) -> dict[int, float]:
    """The share of the pixels of every class that is there; pixels without a class count in the whole only."""
    values, counts = np.unique(mask, return_counts=True)
    rows = zip(values.tolist(), counts.tolist(), strict=True)
    return {value: count / mask.size for value, count in rows if value < classes}


def names_of(model: DenseModel) -> tuple[str, ...]:
    return model.class_names or tuple(str(index) for index in range(model.config.num_classes))


def seen(model: DenseModel, image: Image.Image, threshold: float) -> tuple[Image.Image, dict[str, Any]]:
    """The picture, and every object in it."""
    kept, names = restored(*detect(model, image, threshold)), names_of(model)
    picture = draw_objects(image, kept["boxes"], kept["labels"], kept["scores"], kept.get("masks"), names)
    rows = zip(kept["boxes"].tolist(), kept["labels"].tolist(), kept["scores"].tolist(), strict=True)
    objects = [{"class": names[label], "score": score, "box": box} for box, label, score in rows]
    return picture, {"objects": objects}


@torch.inference_mode()
def detect(model: DenseModel, image: Image.Image, threshold: float) -> tuple[Target, Target]:
    """The objects in an image with at least this score, on the CPU, as the model saw them; and what `restored` needs
    to take them (or some of them: masks of a large photo are large) back to the image's own pixels.
    """
    none = Objects(torch.zeros(0, 4), torch.zeros(0).long(), None, torch.zeros(0).bool(), torch.zeros(0))
    tensor, target = detection_transform(model)(Annotated(image, none))
    prediction = model([tensor.to(next(model.parameters()).device)])[0]
    return {name: value[prediction["scores"] >= threshold].cpu() for name, value in prediction.items()}, target
