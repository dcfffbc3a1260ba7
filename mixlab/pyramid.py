"""Any backbone's pyramid at the strides that detectors and segmenters expect."""

from torch import Tensor, nn

from mixlab.backbone import Backbone
from mixlab.ops.resample import rescale_map

STRIDES = (4, 8, 16, 32)


class PyramidAdapter(nn.Module):
    """Maps at strides 4, 8, 16 and 32, resampled from the backbone's own; a map at its stride is passed on as it is.

    Four native maps are taken one to one, from shallow to deep; fewer or more are spread evenly.
    """

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone
        last = len(backbone.strides) - 1
        self.sources = tuple(round(level * last / (len(STRIDES) - 1)) for level in range(len(STRIDES)))
        self.strides = STRIDES
        self.channels = tuple(backbone.channels[source] for source in self.sources)

    def forward(self, image: Tensor) -> list[Tensor]:
        maps = self.backbone.pyramid(image)
        height, width = image.shape[-2:]
        adapted = []
        for source, stride in zip(self.sources, STRIDES, strict=True):
            if self.backbone.strides[source] == stride:
                adapted.append(maps[source])
            else:
                native = self.backbone.strides[source]
                adapted.append(rescale_map(maps[source], native / stride, -(-height // stride), -(-width // stride)))
        return adapted
