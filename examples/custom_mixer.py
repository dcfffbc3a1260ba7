"""A token mixer of your own in thirty lines, beside pooling and attention in the same frame."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import mixlab
from mixlab.core.grid import Grid
from mixlab.models.mixers.base import MIXERS, Mixer, StageParts


@dataclass(frozen=True)
class AxialOptions:
    expansion: int = 1


class Axial(Mixer):
    """Every token gets the mean of its row and the mean of its column, through a gate of its own."""

    def __init__(self, dim: int, expansion: int) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(dim, dim * expansion), nn.Linear(dim, dim * expansion)
        self.out = nn.Linear(dim * expansion, dim)

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        image = grid.image(tokens)  # (B, H*W, C), class tokens left out
        plane = self.value(image).unflatten(1, (grid.height, grid.width))  # (B, H, W, C)
        cross = plane.mean(1, keepdim=True) + plane.mean(2, keepdim=True)  # (B, H, W, C)
        return grid.behind_zeros(self.out(cross.flatten(1, 2) * self.gate(image).sigmoid()))


@MIXERS.register("axial", AxialOptions)
def build_stage(options: AxialOptions, dim: int, depth: int, reference_grid: Grid) -> StageParts:
    return StageParts.of(Axial(dim, options.expansion) for _ in range(depth))


def main() -> None:
    torch.manual_seed(0)
    photo = torch.randn(1, 3, 45, 70)  # any size
    for mixer in ("pool", "axial", "attention"):
        model = mixlab.create_model("caformer_pico", num_classes=10, mixers=["sepconv", "sepconv", mixer, mixer]).eval()
        maps = [tuple(level.shape[1:]) for level in model.pyramid(photo)]
        millions = mixlab.macs(model, 32) / 1e6
        print(f"{mixer:10} {millions:.1f} MMACs at 32 px, scores {tuple(model(photo).shape)}, maps {maps}")


if __name__ == "__main__":
    main()
