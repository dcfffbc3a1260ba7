"""Where tokens lie in the image: the second half of the mixer contract."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class Grid(NamedTuple):
    """A token sequence is `prefix` class tokens, then height x width image tokens row by row."""

    height: int
    width: int
    prefix: int = 0

    @property
    def image_tokens(self) -> int:
        return self.height * self.width

    @property
    def tokens(self) -> int:
        return self.prefix + self.height * self.width

    def image(self, tokens: Tensor) -> Tensor:
        """The image tokens alone, (B, H*W, C)."""
        return tokens[:, self.prefix :] if self.prefix else tokens

    def behind_zeros(self, image: Tensor) -> Tensor:
        """Image tokens behind zeros in the place of the class tokens: what a purely spatial mixer returns."""
        return F.pad(image, (0, 0, self.prefix, 0)) if self.prefix else image

    def pixels(self, tokens: Tensor) -> Tensor:
        """The image tokens as a (B, H, W, C) view."""
        return self.image(tokens).unflatten(1, (self.height, self.width))

    def to_map(self, tokens: Tensor) -> Tensor:
        """The image tokens as a (B, C, H, W) view in channels-last memory."""
        return self.pixels(tokens).permute(0, 3, 1, 2)

    def from_map(self, image_map: Tensor) -> Tensor:
        """The image tokens of a map, (B, H*W, C)."""
        return image_map.permute(0, 2, 3, 1).flatten(1, 2)
