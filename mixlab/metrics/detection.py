"""Average precision of boxes and masks, as COCO defines it."""

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mixlab.core.errors import DataError
from mixlab.data.object_transforms import restored
from mixlab.models.backbone import evaluating
from mixlab.models.dense_model import DenseModel

Objects = Mapping[str, Tensor]
Annotation = dict[str, Any]  # in COCO's words
KINDS = {"box": "bbox", "mask": "segm"}
STATISTICS = ("AP", "AP50", "AP75", "APs", "APm", "APl")


@dataclass(frozen=True)
class ImageScores:
    """One image as COCO describes it, with masks run-length encoded: small enough to keep and to send."""

    size: tuple[int, int]
    truths: list[Annotation]
    found: list[Annotation]
    masks: bool  # whether both sides have them


@dataclass
class DetectionScores:
    """Collects detections and truths, batch by batch, until their average precision is asked for.

    An image that is added twice, such as on two processes, counts once.
    """

    class_names: Sequence[str]
    images: dict[Any, ImageScores] = field(default_factory=dict)

    def add(self, predictions: Sequence[Objects], truths: Sequence[Objects], ids: Iterable[Any]) -> None:
        """Detections, truths and a name or number of each image. Both in pixels of the same image.

        Truths may have `crowd` (N,) and `area` (N,), otherwise measured on the mask or the box.
        """
        for name, prediction, truth in zip(ids, predictions, truths, strict=True):
            name = name.item() if isinstance(name, Tensor) else name
            self.images[name] = describe(prediction, truth, name, len(self.class_names))

    def compute(self) -> dict[str, float]:
        """`box_AP`, `box_AP50`, ... and `mask_AP`, ... where there are masks; -1 where there is no such object.

        Where processes work together each one has to call this, and gets the result over all images.
        """
        images = gather(self.images)
        if not images:
            raise DataError("There are no images to compute an average precision of.")
        kinds = KINDS if all(image.masks for image in images.values()) else {"box": KINDS["box"]}
        listed = [images[name] for name in sorted(images, key=str)]
        scores = {}
        for kind, word in kinds.items():
            found = precision(listed, word, self.class_names)
            scores.update({f"{kind}_{name}": value for name, value in zip(STATISTICS, found, strict=True)})
        return scores


def average_precision(
    predictions: Sequence[Objects], truths: Sequence[Objects], class_names: Sequence[str]
) -> dict[str, float]:
    """The scores of `DetectionScores.compute` for images whose detections and truths are at hand."""
    scores = DetectionScores(class_names)
    scores.add(predictions, truths, range(len(predictions)))
    return scores.compute()


def evaluate_detection(
    model: DenseModel,
    batches: Iterable[tuple[Sequence[Tensor], Sequence[Objects], Iterable[Any]]],
    class_names: Sequence[str] | None = None,
) -> dict[str, float]:
    """Average precision of a detector on batches of images, targets and the images' names or numbers.

    Targets of `eval_object_transform` are in pixels of the original images; detections are taken back to those.
    """
    scores = DetectionScores(model.class_names if class_names is None else class_names)
    device = next(model.parameters()).device
    with evaluating(model), torch.inference_mode():
        for images, targets, ids in batches:
            predictions = model([image.to(device) for image in images])
            pairs = zip([on_cpu(own) for own in predictions], map(on_cpu, targets), strict=True)
            whole = [restored(own, target) if "scale" in target else own for own, target in pairs]
            scores.add(whole, targets, ids)
    return scores.compute()


def on_cpu(values: Objects) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in values.items()}


def gather(images: dict[Any, ImageScores]) -> dict[Any, ImageScores]:
    """Those of all processes."""
    if not (dist.is_available() and dist.is_initialized()):
        return images
    parts: list[dict[Any, ImageScores]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, images)
    return {name: image for part in parts for name, image in part.items()}


def describe(prediction: Objects, truth: Objects, name: Any, classes: int) -> ImageScores:
    prediction, truth = on_cpu(prediction), on_cpu(truth)
    for labels in (prediction["labels"], truth["labels"]):
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            raise DataError(f"Image {name!r} has labels {labels.unique().tolist()}; there are {classes} classes.")
    sizes = {tuple(side["masks"].shape[1:]) for side in (prediction, truth) if len(side.get("masks", ()))}
    if len(sizes) > 1:
        raise DataError(f"Image {name!r} has masks of several sizes: {sorted(sizes)}. Take detections back to its own.")
    truths, found = annotations(truth), annotations(prediction)
    crowd, area = truth.get("crowd"), truth.get("area")
    for index, one in enumerate(truths):
        one["iscrowd"] = 0 if crowd is None else int(crowd[index])
        one["area"] = measured(one) if area is None else float(area[index])
    for one, score in zip(found, prediction["scores"].tolist(), strict=True):
        one["score"] = score
    masks = "masks" in prediction and ("masks" in truth or not truths)
    return ImageScores(sizes.pop() if sizes else (0, 0), truths, found, masks)  # type: ignore[arg-type]


def annotations(objects: Objects) -> list[Annotation]:
    """Category ids count from 1; boxes are left, top, width, height."""
    boxes = objects["boxes"].double()
    sides = torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1).tolist()
    listed: list[Annotation] = [
        {"category_id": label + 1, "bbox": box} for label, box in zip(objects["labels"].tolist(), sides, strict=True)
    ]
    masks = objects.get("masks")
    if masks is not None and len(masks):
        encoded = coco("core.mask").encode(np.asfortranarray(masks.permute(1, 2, 0).to(torch.uint8).numpy()))
        for one, mask in zip(listed, encoded, strict=True):
            one["segmentation"] = mask
    return listed


def coco(part: str = "") -> Any:
    """faster-coco-eval, or a part of it, where it is installed."""
    try:
        return importlib.import_module(f"faster_coco_eval.{part}".rstrip("."))
    except ImportError as error:
        raise DataError("Average precision needs faster-coco-eval: pip install 'mixlab[dense]'.") from error


def measured(one: Annotation) -> float:
    if "segmentation" in one:
        return float(coco("core.mask").area(one["segmentation"]))
    return float(one["bbox"][2] * one["bbox"][3])


def precision(images: Sequence[ImageScores], kind: str, class_names: Sequence[str]) -> list[float]:
    """COCO's first six numbers. Its measure reads either boxes or masks of what was found, and their areas."""
    read = "bbox" if kind == "bbox" else "segmentation"
    truths: list[Annotation] = []
    found: list[Annotation] = []
    for index, image in enumerate(images, 1):
        truths += [{**one, "image_id": index, "id": len(truths) + at} for at, one in enumerate(image.truths, 1)]
        found += [
            {"image_id": index, "category_id": one["category_id"], "score": one["score"], read: one[read]}
            for one in image.found
        ]
    described = coco().COCO(
        {
            "images": [{"id": i, "height": one.size[0], "width": one.size[1]} for i, one in enumerate(images, 1)],
            "categories": [{"id": number, "name": name} for number, name in enumerate(class_names, 1)],
            "annotations": truths,
        }
    )
    measure = coco().COCOeval_faster(described, described.loadRes(found), kind, print_function=lambda *words: None)
    measure.run()
    return [float(value) for value in measure.stats[: len(STATISTICS)]]
