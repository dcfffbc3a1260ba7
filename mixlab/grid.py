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

    def to_map(self, tokens: Tensor) -> Tensor:
        """The image tokens as a (B, C, H, W) view in channels-last memory; class tokens are left out."""
        image = tokens[:, self.prefix :] if self.prefix else tokens
        return image.unflatten(1, (self.height, self.width)).permute(0, 3, 1, 2)

    def to_tokens(self, image_map: Tensor) -> Tensor:
        """The inverse of `to_map`, with zeros in the place of the class tokens."""
        tokens = image_map.permute(0, 2, 3, 1).flatten(1, 2)  # (B, H*W, C)
        return F.pad(tokens, (0, 0, self.prefix, 0)) if self.prefix else tokens
