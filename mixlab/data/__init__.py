"""Datasets, transforms and loaders."""

from mixlab.data.base import ImageData
from mixlab.data.check import DataReport, check_data
from mixlab.data.images import decode
from mixlab.data.loader import Batch, Loader
from mixlab.data.open import open_data, require_same_classes, splits
from mixlab.data.shards import ShardStream
from mixlab.data.subset import Joined, Subset, hold_out
from mixlab.data.transforms import BatchMix, eval_transform, train_transform

__all__ = [
    "Batch",
    "BatchMix",
    "DataReport",
    "ImageData",
    "Joined",
    "Loader",
    "ShardStream",
    "Subset",
    "check_data",
    "decode",
    "eval_transform",
    "hold_out",
    "open_data",
    "require_same_classes",
    "splits",
    "train_transform",
]
