"""What a dataset with a mask or with objects per image is."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from PIL import Image
from torch import Tensor

from mixlab.data.kinds import Array

IGNORE = 255  # in masks: belongs to no class, counts nowhere


class Masked(NamedTuple):
    """An image and the class of each of its pixels."""

    image: Image.Image
    mask: Array  # (H, W) uint8: a class, or IGNORE


@dataclass(frozen=True)
class Objects:
    """What is to be found in one image. A crowd is no object to find, and nothing found in it counts as wrong."""

    boxes: Tensor  # (N, 4) float32: left, top, right, bottom in pixels
    labels: Tensor  # (N,) int64 classes, counted from 0
    masks: Tensor | None  # (N, H, W) bool, or None where a dataset has boxes only
    crowd: Tensor  # (N,) bool
    area: Tensor  # (N,) float32, in pixels of the original image

    def __len__(self) -> int:
        return len(self.boxes)


class Annotated(NamedTuple):
    """An image and its objects."""

    image: Image.Image
    objects: Objects


class MaskData(ABC):
    """One split for segmentation. Reading is stateless."""

    class_names: tuple[str, ...]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> Masked:
        """Image (upright, L or RGB) and mask of the same size. Raises `UnreadableImage` or `DataError`."""

    @abstractmethod
    def name(self, index: int) -> str: ...


class ObjectData(ABC):
    """One split for detection. Reading is stateless."""

    class_names: tuple[str, ...]  # without background
    has_masks: bool

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> Annotated:
        """Image (upright, L or RGB) and objects. Raises `UnreadableImage` or `DataError`."""

    @abstractmethod
    def name(self, index: int) -> str: ...
