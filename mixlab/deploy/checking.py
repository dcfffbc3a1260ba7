"""Whether an exported file computes what the model computes: on random images, and on the images of a dataset."""

from dataclasses import dataclass
from os import PathLike

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixlab.core.errors import ConfigError, DataError, ExportError
from mixlab.data.loader import Loader
from mixlab.data.open import open_data
from mixlab.deploy.onnx import Run
from mixlab.deploy.specimen import Specimen
from mixlab.evals.quality.accuracy import check_classes
from mixlab.models.model import Model
from mixlab.training.tasks.classification import accuracy

CHECKED = (1, 3)  # batches that an export with a dynamic batch is run with; it is traced with another
EVAL_BATCH = 32


def compare(specimen: Specimen, run: Run, batch: int | None) -> tuple[float, float]:
    """The largest difference of scores on random images, and the largest score."""
    apart, scale = torch.tensor(0.0), torch.tensor(0.0)
    for count in CHECKED if batch is None else (batch,):
        images = images_for(specimen, count, seed=count)
        with torch.inference_mode():
            expected = specimen.model(images.to(device_of(specimen.model))).cpu()
        given = run(images)
        if given.shape != expected.shape:
            raise ExportError(f"The export gives {tuple(given.shape)} for scores of {tuple(expected.shape)}.")
        apart = torch.maximum(apart, (given - expected).abs().max())  # passes on what is not a number
        scale = torch.maximum(scale, expected.abs().max())
    return float(apart), float(scale)


def images_for(specimen: Specimen, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, specimen.in_channels, *specimen.image_size, generator=generator)


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


@dataclass(frozen=True)
class Accuracy:
    """The top-1 accuracy in percent on a split, of a model and of what was made of it."""

    loader: Loader
    model: nn.Module
    batch: int | None

    @classmethod
    def on(cls, specimen: Specimen, data: str | PathLike[str], split: str, batch: int | None) -> "Accuracy":
        """The data is there and has the model's classes, or this raises."""
        if specimen.task != "classification":
            raise ConfigError(f"Accuracy is measured of classifiers; this model is for {specimen.task}.")
        source = open_data(data, split)  # type: ignore[arg-type]
        if isinstance(specimen.model, Model):
            check_classes(specimen.model, source.class_names, str(data))
        elif specimen.num_classes != len(source.class_names):
            raise DataError(
                f"The model tells {specimen.num_classes} classes apart; {data} has {len(source.class_names)}."
            )
        loader = Loader(source, specimen.transform(), batch_size=EVAL_BATCH, train=False, seed=0)
        return cls(loader, specimen.model, batch)

    def of_model(self) -> float:
        device = device_of(self.model)
        return self.of(lambda images: self.model(images.to(device)).cpu())

    def of_file(self, run: Run) -> float:
        return self.of(run if self.batch is None else in_batches(run, self.batch))

    def of(self, run: Run) -> float:
        with torch.inference_mode():
            return accuracy(run, self.loader)["top1"]  # type: ignore[arg-type]


def in_batches(run: Run, batch: int) -> Run:
    """For any number of images, of what takes one number only: the last batch is filled up with zeros."""

    def whole(images: Tensor) -> Tensor:
        parts = [
            run(F.pad(part, (0, 0) * 3 + (0, batch - part.shape[0])).contiguous())[: part.shape[0]]
            for part in images.split(batch)
        ]
        return torch.cat(parts)

    return whole
