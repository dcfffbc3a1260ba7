"""Any backbone's pyramid at the strides that detectors and segmenters expect."""

from torch import Tensor, nn

from mixlab.models.model import Model
from mixlab.ops.resample import rescale_map

STRIDES = (4, 8, 16, 32)


class PyramidAdapter(nn.Module):
    """Maps at strides 4, 8, 16 and 32, resampled from the backbone's own; a map at its stride is passed on as it is.

    Four native maps are taken one to one, from shallow to deep; fewer or more are spread evenly. With `learned`, a map
    that is 2 or 4 times too coarse is refined by transposed convolutions of stride 2 (batch norm and GELU between
    them) and one that is twice too fine is max-pooled: what a task trains along (Vision-LSTM's dense tasks). Sides
    that are no multiple of the coarsest stride are then rounded up as the backbone rounds them.
    """

    def __init__(self, backbone: Model, *, learned: bool = False) -> None:
        super().__init__()
        self.backbone = backbone
        last = len(backbone.strides) - 1
        self.sources = tuple(round(level * last / (len(STRIDES) - 1)) for level in range(len(STRIDES)))
        self.strides: tuple[int, ...] = STRIDES
        self.channels = tuple(backbone.channels[source] for source in self.sources)
        pairs = zip(self.sources, STRIDES, strict=True)
        self.steps = nn.ModuleList(
            rescaling(backbone.channels[source], backbone.strides[source], stride) if learned else nn.Identity()
            for source, stride in pairs
        )

    def forward(self, image: Tensor) -> list[Tensor]:
        maps = self.backbone.pyramid(image)
        height, width = image.shape[-2:]
        adapted = []
        for source, stride, step in zip(self.sources, self.strides, self.steps, strict=True):
            level, native = maps[source], self.backbone.strides[source]
            if not isinstance(step, nn.Identity):
                level = step(level)
            elif native != stride:
                level = rescale_map(level, native / stride, -(-height // stride), -(-width // stride))
            adapted.append(level)
        return adapted


def rescaling(channels: int, native: int, stride: int) -> nn.Module:
    """Return the learned step from one stride to another: none if they agree or are no power of two apart."""
    if native == 4 * stride:
        first, second = (nn.ConvTranspose2d(channels, channels, 2, 2) for _ in range(2))
        return nn.Sequential(first, nn.BatchNorm2d(channels), nn.GELU(), second)
    if native == 2 * stride:
        return nn.ConvTranspose2d(channels, channels, 2, 2)
    return nn.MaxPool2d(2, ceil_mode=True) if 2 * native == stride else nn.Identity()
