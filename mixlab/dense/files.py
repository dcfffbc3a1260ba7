"""Segmenters and detectors from files that `save_weights` wrote."""

from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch

from mixlab.core.errors import WeightsError
from mixlab.dense.timm_maps import TimmMaps, is_timm
from mixlab.models.backbone import Backbone
from mixlab.models.build import build
from mixlab.models.config import ModelConfig
from mixlab.models.dense_model import DenseModel
from mixlab.models.fitting import differences
from mixlab.models.weights import read


def load_dense(path: str | PathLike[str]) -> DenseModel:
    """The segmenter or detector of a file, with its weights and class names."""
    checkpoint = read(path)
    about = checkpoint.about
    if about.task is None or not about.configs:
        raise WeightsError(f"{path} holds no segmenter or detector: use create_model(weights=...) for a classifier.")
    with torch.device("meta"):
        model = build_dense(about.task["name"], build_backbone(about.configs[0]), about.task["config"])
    own = model.state_dict()
    problems = differences(dict(checkpoint.tensors), own)
    if problems:
        raise WeightsError(f"{path} does not fit the {about.task['name']} model that it describes: {problems}")
    fresh = build_dense(about.task["name"], build_backbone(about.configs[0]), about.task["config"])
    fresh.load_state_dict(checkpoint.tensors)
    fresh.class_names = about.class_names
    return fresh


def build_backbone(config: ModelConfig) -> Backbone:
    return TimmMaps(config) if is_timm(config.name) else build(config)


def task_of(path: str | PathLike[str]) -> str:
    """What a weight file is for."""
    task = read(path, tensors=False).about.task
    return "classification" if task is None else str(task["name"])


def build_dense(task: str, backbone: Backbone, config: Mapping[str, Any]) -> DenseModel:
    """A model for a task from its config as plain data."""
    if task == "segmentation":
        from mixlab.dense.segmenter import Segmenter, SegmenterConfig

        return Segmenter(backbone, SegmenterConfig.parse(config))
    if task == "detection":
        from mixlab.dense.detector import DetectorConfig, build_detector

        return build_detector(backbone, DetectorConfig.parse(config))
    raise WeightsError(f"This version has no models for {task!r}.")
