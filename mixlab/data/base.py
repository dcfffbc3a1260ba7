"""What a dataset is: images that can be read by index, with labels."""

from abc import ABC, abstractmethod

from PIL import Image


class ImageData(ABC):
    """One split of a labeled dataset. Reading is stateless, so that any worker may read any index in any order."""

    class_names: tuple[str, ...]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def label(self, index: int) -> int:
        """The class of an image, without reading it."""

    @abstractmethod
    def read(self, index: int) -> Image.Image:
        """The image, upright, in mode L or RGB. Raises `UnreadableImage` if it cannot be decoded."""

    @abstractmethod
    def name(self, index: int) -> str:
        """What to call an image in messages: its path, or the dataset's name and the index."""
