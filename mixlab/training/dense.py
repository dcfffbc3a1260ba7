"""Runs of segmenters and detectors: the same loop, other data, models and batches."""

from dataclasses import replace
from typing import Any

from mixlab.core.errors import ConfigError, DataError
from mixlab.data.loader import IndexedData, Loader
from mixlab.data.mask_transforms import refuse, train_mask_transform
from mixlab.data.object_transforms import RandomCrop, eval_object_transform, train_object_transform
from mixlab.data.open_dense import dense_splits, open_dense
from mixlab.data.shards import ShardStream
from mixlab.dense.detector import DetectorConfig, create_detector
from mixlab.dense.files import load_dense, task_of
from mixlab.dense.segmenter import Segmenter, create_segmenter
from mixlab.dense.timm_maps import PRETRAINED
from mixlab.metrics.detection import coco
from mixlab.models.config import parse_image_size
from mixlab.models.dense_model import DenseModel
from mixlab.models.released import is_released
from mixlab.training.loop import Metrics, Task, Trainer
from mixlab.training.recipe import Detection, Segmentation
from mixlab.training.run import Preparation
from mixlab.training.tasks.detection import DetectionTask, precision
from mixlab.training.tasks.segmentation import SegmentationTask, scores


class DensePreparation(Preparation):
    """What both tasks have in common."""

    task_name: str

    def splits(self) -> list[str]:
        return dense_splits(self.config.data, self.task_name)

    def open(self, split: str) -> Any:
        return open_dense(self.config.data, split, self.task_name)

    def build(self, options: dict[str, Any]) -> DenseModel:
        """The decoder or detector on the named backbone, or the whole model of a weight file."""
        weights = self.config.weights
        if weights is None or weights == PRETRAINED or is_released(weights) or task_of(weights) != self.task_name:
            return self.create({name: value for name, value in options.items() if name != "num_classes"}, weights)
        model = load_dense(weights)
        if model.backbone.config.name != self.config.model:
            raise ConfigError(f"{weights} was trained on {model.backbone.config.name}, not on {self.config.model}.")
        if model.config.num_classes != len(self.train_data.class_names):
            raise DataError(
                f"{weights} tells {model.config.num_classes} classes apart; {self.config.data} has "
                f"{len(self.train_data.class_names)}. Start from the weights of a classifier instead."
            )
        return model

    def create(self, options: dict[str, Any], weights: str | None) -> DenseModel:
        raise NotImplementedError

    def preprocessing(self) -> tuple[Any, int]:
        assert isinstance(self.model, DenseModel)
        config = self.model.backbone.config
        return config.preprocessing, config.in_channels


class SegmentationPreparation(DensePreparation):
    task_name = "segmentation"

    @property
    def words(self) -> Segmentation:
        return self.recipe.segmentation or Segmentation()

    def create(self, options: dict[str, Any], weights: str | None) -> Segmenter:
        words = self.words
        names: tuple[str, ...] = ("width", "auxiliary_weight", "auxiliary_width", "auxiliary_map", "balance")
        names += ("mode", "scales", "flip")
        stride = words.stride if words.stride <= self.crop() else None
        return create_segmenter(
            self.config.model,
            words.decoder,
            num_classes=len(self.train_data.class_names),
            weights=weights,
            backbone_options=options,
            image_size=self.crop(),
            stride=stride,
            norms=words.norms and words.decoder != "linear",  # which has a norm of its own
            **{name: getattr(words, name) for name in names},
        )

    def crop(self) -> int:
        return self.recipe.image_size or 512

    def own_image_size(self) -> tuple[int, int]:
        return parse_image_size(self.crop())

    def task(self) -> Task:
        transform = train_mask_transform(self.recipe.augmentation, self.image_size, *self.preprocessing())
        return SegmentationTask(
            train=self.loader(self.train_data, transform, training=True, batch=self.micro),
            val=self.val_data,
            processes=self.processes,
        )

    def evaluate_on(self, data: Any, trainer: Trainer) -> Metrics:
        return scores(trainer.evaluated, data, self.processes)


class DetectionPreparation(DensePreparation):
    task_name = "detection"

    @property
    def sizes(self) -> Detection:
        return self.recipe.detection or Detection()

    def create(self, options: dict[str, Any], weights: str | None) -> DenseModel:
        if self.recipe.image_size is not None:
            raise ConfigError(
                "Detection has no image_size: set detection.shorter, detector.shorter and detector.longer."
            )
        coco()  # before an epoch is trained that could not be evaluated
        config = replace(self.recipe.detector or DetectorConfig(), num_classes=len(self.train_data.class_names))
        if config.masks and config.kind != "deformable_detr" and not self.train_data.has_masks:
            raise ConfigError(f"{self.config.data} has boxes only: train without masks (--set detector.masks=false).")
        row = config.plain() | {"masks": config.masks and config.kind != "deformable_detr"}
        return create_detector(self.config.model, weights=weights, backbone_options=options, **row)

    @property
    def detector(self) -> DetectorConfig:
        assert isinstance(self.model, DenseModel)
        assert isinstance(self.model.config, DetectorConfig)
        return self.model.config

    def own_image_size(self) -> tuple[int, int]:
        shorter = max(self.sizes.shorter)
        return shorter, max(shorter, min(self.detector.longer, 2 * shorter))

    def task(self) -> Task:
        words, sizes = self.recipe.augmentation, self.sizes
        refuse(words, "detection")
        preprocessing, channels = self.preprocessing()
        transform = train_object_transform(
            shorter=sizes.shorter,
            longer=self.detector.longer,
            flip=words.flip,
            preprocessing=preprocessing,
            channels=channels,
            crop=RandomCrop(sizes.crop) if sizes.crop else None,
            jitter=words.jitter,
        )
        return DetectionTask(
            train=self.loader(self.train_data, transform, training=True, batch=self.micro),
            val=None if self.val_data is None else self.detection_loader(self.val_data),
        )

    def detection_loader(self, data: IndexedData | ShardStream) -> Loader:
        transform = eval_object_transform(self.detector.shorter, self.detector.longer, *self.preprocessing())
        return self.loader(data, transform, training=False, batch=self.micro)

    def evaluate_on(self, data: Any, trainer: Trainer) -> Metrics:
        return precision(trainer.evaluated, self.detection_loader(data))


PREPARATIONS: dict[str, type[DensePreparation]] = {
    "segmentation": SegmentationPreparation,
    "detection": DetectionPreparation,
}
