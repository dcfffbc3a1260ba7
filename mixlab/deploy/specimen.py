"""What is exported: a classifier or a segmenter in eval mode, and what a consumer has to know to feed it."""

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mixlab.core.errors import ConfigError, ExportError, WeightsError
from mixlab.core.version import VERSION
from mixlab.data.transforms import Transform, eval_transform
from mixlab.dense.files import load_dense, task_of
from mixlab.evals.subjects import open_subject
from mixlab.models.config import MIN_SIDE, Preprocessing, parse_image_size
from mixlab.models.dense_model import DenseModel
from mixlab.models.mixers import Mixer
from mixlab.models.model import Model
from mixlab.models.zoo import list_models

Source = str | PathLike[str] | Model | DenseModel
Size = int | Sequence[int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Specimen:
    """A model for one image size."""

    model: nn.Module
    name: str
    task: str
    image_size: tuple[int, int]
    in_channels: int
    num_classes: int
    class_names: tuple[str, ...]
    preprocessing: Preprocessing
    trained: bool

    def about(self, batch: int | None) -> dict[str, Any]:
        """JSON-ready: how to prepare images, and what the scores mean."""
        settings = self.preprocessing
        return {
            "mixlab": VERSION,
            "model": self.name,
            "task": self.task,
            "batch": "dynamic" if batch is None else batch,
            "in_channels": self.in_channels,
            "image_size": list(self.image_size),
            "interpolation": settings.interpolation,
            "crop": settings.crop,
            "crop_mode": settings.crop_mode,
            "mean": list(settings.mean),
            "std": list(settings.std),
            "num_classes": self.num_classes,
            "class_names": list(self.class_names),
        }

    def transform(self) -> Transform:
        return eval_transform(self.image_size, self.preprocessing, self.in_channels)


def open_specimen(source: Source, image_size: Size | None) -> Specimen:
    """The model that a text, a file or an object stands for. Detectors, and what no graph can hold, are errors here."""
    dense = dense_model(source)
    if dense is not None:
        found = of_segmenter(dense, image_size)
    else:
        assert not isinstance(source, DenseModel)
        subject = open_subject(source, image_size=None if image_size is None else parse_size(image_size))
        model = subject.model
        found = Specimen(
            model=model,
            name=model.config.name if isinstance(model, Model) else subject.name.partition("=")[0],
            task="classification" if subject.num_classes else "features",
            image_size=subject.image_size,
            in_channels=subject.in_channels,
            num_classes=subject.num_classes,
            class_names=tuple(subject.class_names),
            preprocessing=subject.preprocessing,
            trained=subject.trained,
        )
    check_exportable(found)
    return found


def parse_size(image_size: Size) -> tuple[int, int]:
    return parse_image_size(image_size if isinstance(image_size, int) else tuple(image_size))


def dense_model(source: Source) -> DenseModel | None:
    """The segmenter or detector, if it is one."""
    if isinstance(source, DenseModel):
        return source
    if isinstance(source, Model) or str(source) in list_models() or not Path(source).is_file():
        return None
    try:
        task = task_of(source)
    except WeightsError:  # a file of other code: opening it as a classifier says what is wrong
        return None
    if task not in ("classification", "segmentation"):
        raise unsupported(task)
    return load_dense(source) if task == "segmentation" else None


def of_segmenter(model: DenseModel, image_size: Size | None) -> Specimen:
    if model.task != "segmentation":
        raise unsupported(model.task)
    backbone, side = model.backbone.config, getattr(model.config, "image_size", None)
    size = next(one for one in (image_size, side, backbone.image_size) if one is not None)
    return Specimen(
        model=model.eval(),
        name=backbone.name,
        task=model.task,
        image_size=parse_size(size),
        in_channels=backbone.in_channels,
        num_classes=model.config.num_classes,
        class_names=tuple(model.class_names),
        preprocessing=backbone.preprocessing,
        trained=True,
    )


def unsupported(task: str) -> ExportError:
    return ExportError(
        f"A model for {task} cannot be exported: what it returns differs in number from image to image. Classifiers "
        f"and segmenters can, and so can this model's backbone (export(model.backbone, ...) for its features)."
    )


def check_exportable(found: Specimen) -> None:
    """Raise before anything long starts."""
    if min(found.image_size) < MIN_SIDE:
        raise ConfigError(f"Images need sides of {MIN_SIDE} px or more; got {found.image_size}.")
    refused = sorted({type(m).__name__ for m in found.model.modules() if isinstance(m, Mixer) and not m.exports})
    if refused:
        raise ExportError(f"The mixer {', '.join(refused)} of {found.name!r} cannot become a graph (exports = False).")
    kinds = {parameter.dtype for parameter in found.model.parameters() if parameter.is_floating_point()}
    if kinds - {torch.float32}:
        told = ", ".join(sorted(str(kind) for kind in kinds))
        raise ExportError(f"Export takes models in float32; {found.name!r} has {told}. Use model.float().")
    if any(parameter.is_meta for parameter in found.model.parameters()):
        raise ExportError(f"{found.name!r} has no values to export: it is on the meta device.")
