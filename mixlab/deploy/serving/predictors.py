"""From an uploaded image to what a model says about it, one predictor per task.

`prepare` runs in any thread, `run` only in the one that owns the model. Both may raise `Refusal`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mixlab.core.errors import ConfigError
from mixlab.data.object_transforms import restored
from mixlab.data.transforms import Resize, eval_transform, evaluation_steps
from mixlab.dense.segmentation import segment
from mixlab.dense.segmenter import Segmenter
from mixlab.deploy.serving import answers
from mixlab.deploy.serving.images import decoded
from mixlab.deploy.serving.overlays import classes_png, css_color, heat_png, object_png
from mixlab.evals.inspect.saliency import grad_cam
from mixlab.evals.quality.dense import class_shares, detect, names_of
from mixlab.models.dense_model import DenseModel
from mixlab.models.model import Model


class Predictor(Protocol):
    task: answers.Task
    asked: type[Any]
    answer: type[Any]
    classes: int
    image_size: tuple[int, int]
    stacks: bool  # whether images of a batch go through the model together
    fullest: Any  # everything that can be asked for

    def prepare(self, data: bytes, asked: Any) -> Any: ...

    def run(self, batch: Sequence[Any]) -> list[Any]: ...


@dataclass(frozen=True)
class PreparedImage:
    """An image ready for a classifier, and which part of it the model sees."""

    tensor: Tensor  # (C, H, W)
    width: int
    height: int
    box: list[float]
    asked: answers.AskedClasses


class ClassPredictor:
    """Probabilities of classes, as `mixlab predict` computes them."""

    task: answers.Task = "classification"
    asked = answers.AskedClasses
    answer = answers.ClassificationAnswer
    stacks = True
    fullest = answers.AskedClasses(cam=True)

    def __init__(self, model: Model) -> None:
        settings = model.config.preprocessing
        self.model = model.eval()
        self.classes = model.config.num_classes
        if not self.classes:
            raise ConfigError(f"{model.config.name!r} has no classifier: there are no classes to serve.")
        self.image_size = model.config.evaluation_size
        self.names = model.class_names or tuple(str(index) for index in range(self.classes))
        self.transform = eval_transform(
            self.image_size, settings, model.config.in_channels, settings.crop, settings.interpolation
        )
        self.resize: Resize = evaluation_steps(
            self.image_size, settings.crop, settings.interpolation, settings.crop_mode
        )[0]

    def prepare(self, data: bytes, asked: answers.AskedClasses) -> PreparedImage:
        image = decoded(data)
        return PreparedImage(self.transform(image), image.width, image.height, self.seen_part(image), asked)

    def seen_part(self, image: Image.Image) -> list[float]:
        """Left, top, right, bottom of the center crop, in the image's pixels."""
        height, width = self.resize.size_of(image)
        top, left = round((height - self.image_size[0]) / 2), round((width - self.image_size[1]) / 2)
        across, down = image.width / width, image.height / height
        right, bottom = left + self.image_size[1], top + self.image_size[0]
        return [left * across, top * down, right * across, bottom * down]

    def run(self, batch: Sequence[PreparedImage]) -> list[answers.SeenClasses]:
        images = torch.stack([one.tensor for one in batch]).to(next(self.model.parameters()).device)
        with torch.inference_mode():
            chances = self.model(images).softmax(-1).cpu()  # (B, classes)
        if not bool(chances.isfinite().all()):
            raise ArithmeticError("The model's scores are not finite numbers.")
        best = chances.argmax(-1)
        wanted = [place for place, one in enumerate(batch) if one.asked.cam]
        maps = self.maps(images[wanted], best[wanted]) if wanted else ()
        map_of = dict(zip(wanted, maps, strict=True))
        return [self.told(one, chances[place], int(best[place]), map_of.get(place)) for place, one in enumerate(batch)]

    def maps(self, images: Tensor, targets: Tensor) -> Tensor:
        """Class-activation maps (B, H, W); of an ensemble the mean of its members'."""
        targets = targets.to(images.device)
        maps = [grad_cam(backbone, images, targets) for backbone in self.model.backbones]
        return torch.stack(maps).mean(0).detach().cpu()

    def told(self, one: PreparedImage, chances: Tensor, best: int, shown: Tensor | None) -> answers.SeenClasses:
        values, places = chances.topk(min(one.asked.top, len(chances)))
        cam = None
        if shown is not None:
            png = heat_png(shown.clamp(0, 1).nan_to_num().numpy())
            cam = answers.ClassActivation(name=self.names[best], box=one.box, png=png)
        rows = zip(values.tolist(), places.tolist(), strict=True)
        classes = [answers.ClassScore(name=self.names[place], score=min(value, 1.0)) for value, place in rows]
        return answers.SeenClasses(width=one.width, height=one.height, classes=classes, cam=cam)


@dataclass(frozen=True)
class Waiting:
    """An image that is decoded only when its turn comes: at full size it is large."""

    data: bytes
    asked: Any


class OneByOne:
    """What needs images at full size: they are decoded, and run, one after the other."""

    stacks = False

    def prepare(self, data: bytes, asked: Any) -> Waiting:
        return Waiting(data, asked)

    def run(self, batch: Sequence[Waiting]) -> list[Any]:
        return [self.told(decoded(one.data), one.asked) for one in batch]

    def told(self, image: Image.Image, asked: Any) -> Any:
        raise NotImplementedError


class SegmentationPredictor(OneByOne):
    """Shares of classes and a mask, as `mixlab predict` computes them."""

    task: answers.Task = "segmentation"
    asked = answers.AskedMask
    answer = answers.SegmentationAnswer
    fullest = answers.AskedMask(mask=True)

    def __init__(self, model: Segmenter) -> None:
        self.model = model.eval()
        self.classes, self.names = model.config.num_classes, names_of(model)
        self.image_size = model.config.image_size, model.config.image_size

    def told(self, image: Image.Image, asked: answers.AskedMask) -> answers.SeenMask:
        mask = segment(self.model, image)
        shares = sorted(class_shares(mask, self.classes).items(), key=lambda row: -row[1])
        classes = [
            answers.ClassShare(name=self.names[number], index=number, share=share, color=css_color(number))
            for number, share in shares
        ]
        png = classes_png(mask, self.names) if asked.mask else None
        return answers.SeenMask(width=image.width, height=image.height, classes=classes, mask=png)


class DetectionPredictor(OneByOne):
    """Objects with boxes and masks, as `mixlab predict` finds them."""

    task: answers.Task = "detection"
    asked = answers.AskedObjects
    answer = answers.DetectionAnswer
    fullest = answers.AskedObjects(masks=True)

    def __init__(self, model: DenseModel) -> None:
        self.model = model.eval()
        self.classes, self.names = model.config.num_classes, names_of(model)
        self.image_size = model.config.shorter, model.config.longer  # type: ignore[attr-defined]

    def told(self, image: Image.Image, asked: answers.AskedObjects) -> answers.SeenObjects:
        kept, target = detect(self.model, image, asked.threshold)
        if not asked.masks:
            kept.pop("masks", None)
        order = kept["scores"].argsort(descending=True, stable=True).tolist()
        singles = ({name: value[[place]] for name, value in kept.items()} for place in order)
        objects = [self.one(restored(single, target)) for single in singles]
        return answers.SeenObjects(width=image.width, height=image.height, objects=objects)

    def one(self, found: dict[str, Tensor]) -> answers.FoundObject:
        number, score = int(found["labels"][0]), float(found["scores"][0])
        left, top, right, bottom = found["boxes"][0].tolist()
        if not all(map(math.isfinite, (score, left, top, right, bottom))):
            raise ArithmeticError("The model's boxes are not finite numbers.")
        mask = object_png(np.asarray(found["masks"][0]), number) if "masks" in found else None
        return answers.FoundObject(
            name=self.names[number],
            index=number,
            score=min(score, 1.0),
            box=[left, top, right, bottom],
            color=css_color(number),
            mask=mask,
        )


def predictor_for(model: Model | DenseModel) -> Predictor:
    if isinstance(model, Model):
        return ClassPredictor(model)
    return SegmentationPredictor(model) if isinstance(model, Segmenter) else DetectionPredictor(model)
