"""What several classifiers say about the same images, and how often they are right.

Images come as pixels from 0 to 1 at the size a model takes; the normalization is part of the model here, so that clean,
corrupted and attacked images are judged by one and the same function.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from mixlab.core.errors import DataError, MixlabError, require
from mixlab.data.base import ImageData
from mixlab.data.loader import Batch, LoadedSamples, Loader, Samples, SamplingPlan, options
from mixlab.data.open import AnyData
from mixlab.data.transforms import ToMode, ToTensor, evaluation_steps, mode_for
from mixlab.evals.quality.attacks import Attack, PixelModel
from mixlab.evals.quality.corruptions import Corrupt
from mixlab.evals.quality.scores import Score
from mixlab.evals.subjects import Subject
from mixlab.models.config import parse_image_size

Array = np.ndarray[Any, Any]
Watch = Callable[[str, int, int], None]  # what is measured, images done, images in all


@dataclass(frozen=True, kw_only=True)
class Feeding:
    """How images reach the models. `images` takes that many of the dataset, drawn by the seed."""

    images: int | None = None
    image_size: int | tuple[int, int] | None = None
    crop: float | None = None
    batch: int = 64
    workers: int = 2
    device: torch.device = torch.device("cpu")
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.images is None or self.images >= 1, f"1 image or more; got {self.images}.")
        require(self.crop is None or 0 < self.crop <= 1, f"a crop as a share of the side in (0, 1]; got {self.crop}.")


@dataclass(frozen=True)
class Look:
    """What decides which pixels a model sees; models that share it share the work of making them."""

    size: tuple[int, int]
    channels: int
    crop: float
    interpolation: str
    crop_mode: str = "center"

    @classmethod
    def of(cls, subject: Subject, feeding: Feeding, crop: float | None = None) -> "Look":
        size = subject.image_size if feeding.image_size is None else parse_image_size(feeding.image_size)
        settings = subject.preprocessing
        mode_for(subject.in_channels, settings)  # or an error
        chosen = next(one for one in (crop, feeding.crop, settings.crop) if one is not None)
        return cls(size, subject.in_channels, chosen, settings.interpolation, settings.crop_mode)


@dataclass(frozen=True)
class Pixels:
    """From an image to pixels (C, H, W) from 0 to 1: resized, cut out and then corrupted, in this order."""

    look: Look
    corruption: Corrupt | None = None

    def __call__(self, image: Image.Image) -> Tensor:
        look = self.look
        mode = "L" if look.channels == 1 else "RGB"
        cut = evaluation_steps(look.size, look.crop, look.interpolation, look.crop_mode)
        for step in (ToMode(mode), *cut):
            image = step(image)
        if self.corruption is not None:
            image = self.corruption(image)
        return ToTensor((0.0,) * look.channels, (1.0,) * look.channels)(image)


class PickedLoader(Loader):
    """Some images of a dataset under their own numbers, so that each is corrupted as if all were there."""

    def __init__(self, data: ImageData, transform: Any, picked: Array, **settings: Any) -> None:
        self.picked = picked
        super().__init__(data, transform, train=False, **settings)

    def spans(self) -> list[tuple[int, int]]:
        total = len(self.picked)
        return [(first, min(first + self.batch_size, total)) for first in range(0, total, self.batch_size)]

    def indexed(self, data: Any, epoch: int, start: int) -> Iterable[LoadedSamples]:
        plan = SamplingPlan(self.picked, 1, self.spans()[start:])
        samples = Samples(data, self.transform, seed=self.seed, epoch=epoch, train=False)
        return DataLoader(samples, batch_sampler=plan, **options(min(self.workers, len(plan))))


def batches(source: AnyData, transform: Any, feeding: Feeding) -> tuple[Iterator[Batch], int]:
    """Batches, and how many images they hold in all."""
    settings: dict[str, Any] = {"batch_size": feeding.batch, "seed": feeding.seed, "workers": feeding.workers}
    if feeding.images is None or feeding.images >= len(source):
        return Loader(source, transform, train=False, **settings).epoch(0), len(source)
    if not isinstance(source, ImageData):
        raise DataError("A number of images can be taken from data that is read by index, not from shards.")
    order = np.random.default_rng(feeding.seed).permutation(len(source))
    picked = np.sort(order[: feeding.images])
    return PickedLoader(source, transform, picked, **settings).epoch(0), len(picked)


@dataclass(frozen=True)
class Predictions:
    """The class of each image that a model holds most likely, or -1 if several are."""

    indices: Array  # (N,) in the dataset
    labels: Array
    classes: Array

    @property
    def score(self) -> Score:
        return Score(int((self.labels == self.classes).sum()), len(self.labels))


def by_look(
    subjects: Sequence[Subject], feeding: Feeding, crop: float | None = None
) -> dict[Look, list[tuple[int, PixelModel]]]:
    """The numbers of the models that see the same pixels, ready to judge them."""
    found: dict[Look, list[tuple[int, PixelModel]]] = {}
    for number, subject in enumerate(subjects):
        model = PixelModel(subject).to(feeding.device).eval()
        found.setdefault(Look.of(subject, feeding, crop), []).append((number, model))
    return found


@torch.inference_mode()
def most_likely(model: PixelModel, pixels: Tensor, classes: Tensor | None = None) -> Tensor:
    """(B,). Equal scores and scores that are no numbers count for no class."""
    scores = model(pixels)
    if classes is not None:
        scores = scores[:, classes]
    best, places = scores.max(1)
    places = places if classes is None else classes[places]
    alone = (~(scores < best[:, None])).sum(1) == 1
    return torch.where(alone, places, -1).cpu()


def examine(
    subjects: Sequence[Subject],
    source: AnyData,
    feeding: Feeding,
    *,
    corruption: Corrupt | None = None,
    classes: Sequence[int] | None = None,
    crop: float | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> list[Predictions]:
    """Predictions of every model. `classes` are the only ones that are compared."""
    compared = None if classes is None else torch.tensor(classes, device=feeding.device)
    found: list[list[tuple[Array, Array, Array]]] = [[] for _ in subjects]
    done = 0
    for look, models in by_look(subjects, feeding, crop).items():
        loaded, total = batches(source, Pixels(look, corruption), feeding)
        for batch in loaded:
            pixels = batch.images.to(feeding.device)
            for number, model in models:
                told = most_likely(model, pixels, compared)
                found[number].append((batch.indices.numpy(), batch.labels.numpy(), told.numpy()))
                done += len(told)
                if watch is not None:
                    watch(done, total * len(subjects))
    if not all(found):
        raise DataError("None of the images could be read.")
    return [Predictions(*(np.concatenate(parts) for parts in zip(*rows, strict=True))) for rows in found]


def attacked(
    subjects: Sequence[Subject],
    source: AnyData,
    feeding: Feeding,
    attacks: Sequence[Attack],
    clean: Sequence[Score],
    watch: Callable[[int, int], None] | None = None,
) -> list[dict[Attack, Score]]:
    """Scores of every model under every attack. Each kind also runs with an epsilon of 0, which must change nothing."""
    still = [
        Attack(kind=kind, epsilon=0.0, steps=1, step_size=1.0)
        for kind in dict.fromkeys(attack.kind for attack in attacks)
    ]
    plan = [*still, *(attack for attack in attacks if attack.epsilon)]
    right = [dict.fromkeys(plan, 0) for _ in subjects]
    counts, done = [0] * len(subjects), 0
    for look, models in by_look(subjects, feeding).items():
        loaded, total = batches(source, Pixels(look), feeding)
        for batch in loaded:
            pixels, labels = batch.images.to(feeding.device), batch.labels.to(feeding.device)
            for number, model in models:
                for attack in plan:
                    told = most_likely(model, attack(model, pixels, labels))
                    right[number][attack] += int((told == batch.labels).sum())
                counts[number] += len(labels)
                done += len(labels)
                if watch is not None:
                    watch(done, total * len(subjects))
    found = []
    for subject, row, count, before in zip(subjects, right, counts, clean, strict=True):
        scores = {attack: Score(hits, count) for attack, hits in row.items()}
        check_still(subject.name, [scores[attack] for attack in still], before)
        found.append(scores)
    return found


def check_still(name: str, still: Iterable[Score], clean: Score) -> None:
    """An attack that may change nothing leaves the accuracy as it is; else no number of this run is to be used."""
    for score in still:
        if score != clean:
            raise MixlabError(
                f"{name} tells {score.right} of {score.images} images right under an attack with an epsilon of 0 and "
                f"{clean.right} of {clean.images} without an attack. They must be equal: the model does not give the "
                f"same scores twice, or this is a fault of Mixlab's. No result was kept."
            )
