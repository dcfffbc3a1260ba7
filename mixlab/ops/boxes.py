"""Suppression of overlapping boxes and pooling of boxes from a map, equal to torchvision's compiled operators.

Boxes are (N, 4): left, top, right, bottom. Regions are (K, 5): the image's index in the batch, then such a box.
"""

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 128  # boxes that are compared with each other before the others are
FEW_CHANNELS = 4  # up to here gathering pixel by pixel is slower than products over whole rows


def nms_reference(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """From the best score down: a box is kept unless one that was kept overlaps it by more than the threshold."""
    kept: list[int] = []
    for index in scores.argsort(descending=True, stable=True).tolist():
        if not (overlaps(boxes[kept], boxes[index : index + 1]) > threshold).any():
            kept.append(index)
    return torch.tensor(kept, dtype=torch.int64, device=boxes.device)


def overlaps(first: Tensor, second: Tensor) -> Tensor:
    """Intersection over union of each pair, (N, M); not a number where both are empty."""
    left, top, right, bottom = first.t()[..., None].unbind()  # coordinates apart: pairs lie side by side in memory
    others = second.t().contiguous()
    shared = torch.minimum(right, others[2]).sub_(torch.maximum(left, others[0])).clamp_(min=0)
    shared *= torch.minimum(bottom, others[3]).sub_(torch.maximum(top, others[1])).clamp_(min=0)
    return shared / (areas(first)[:, None] + areas(second)).sub_(shared)


def areas(boxes: Tensor) -> Tensor:
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


@torch.no_grad()
def nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """The indices of the boxes to keep, best first. As `nms_reference`, block by block.

    Within a block "suppressed by a kept box" is iterated until it is stable: the first box is right at once, and each
    round makes at least the next one right.
    """
    order = scores.argsort(descending=True, stable=True)
    ranked = boxes[order].float() if boxes.dtype in (torch.float16, torch.bfloat16) else boxes[order]
    places = torch.arange(len(ranked), device=boxes.device)
    kept = []
    while len(places):
        block, places = places[:BLOCK], places[BLOCK:]
        own = ranked[block]
        suppresses = (overlaps(own, own) > threshold).triu_(1)
        keep, before = ~suppresses.any(0), torch.zeros_like(block, dtype=torch.bool)
        while not torch.equal(keep, before):
            keep, before = ~(suppresses & keep[:, None]).any(0), keep
        kept.append(block[keep])
        places = places[~(overlaps(own[keep], ranked[places]) > threshold).any(0)]
    return order[torch.cat(kept)] if kept else order


def roi_align_reference(
    maps: Tensor,
    regions: Tensor,
    output_size: tuple[int, int],
    *,
    scale: float = 1.0,
    samples: int = -1,
    aligned: bool = False,
) -> Tensor:
    """The mean of bilinear samples in each bin of each region, one sample at a time (Mask R-CNN, section 3)."""
    height, width = maps.shape[-2:]
    shift = 0.5 if aligned else 0.0
    pooled = []
    for region in regions:
        left, top, right, bottom = (region[1:] * scale - shift).unbind()
        rows = axis_samples(top, bottom - top, output_size[0], samples, aligned)
        columns = axis_samples(left, right - left, output_size[1], samples, aligned)
        for ys, xs in itertools.product(rows, columns):
            found = [sample(maps[int(region[0])], y, x, height, width) for y in ys for x in xs]
            pooled.append(sum(found, maps[0, :, 0, 0] * 0) / max(len(found), 1))
    channels = maps.shape[1]
    if not pooled:
        return maps.new_zeros(len(regions), channels, *output_size)
    return torch.stack(pooled).view(len(regions), *output_size, channels).permute(0, 3, 1, 2)


def axis_samples(start: Tensor, extent: Tensor, bins: int, samples: int, aligned: bool) -> list[list[float]]:
    """Where the samples of each bin are along one axis."""
    extent = extent if aligned else extent.clamp(min=1)
    step = extent / bins
    count = samples if samples > 0 else max(math.ceil(step), 0)
    return [[float(start + bin * step + (at + 0.5) * step / count) for at in range(count)] for bin in range(bins)]


def sample(values: Tensor, y: float, x: float, height: int, width: int) -> Tensor:
    """A bilinear sample of (C, H, W): nothing more than a pixel outside, the border's value up to there."""
    if y < -1 or y > height or x < -1 or x > width:
        return values[:, 0, 0] * 0
    y, x = min(max(y, 0.0), height - 1.0), min(max(x, 0.0), width - 1.0)
    top, left = int(y), int(x)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    upper = values[:, top, left] * (1 - (x - left)) + values[:, top, right] * (x - left)
    lower = values[:, bottom, left] * (1 - (x - left)) + values[:, bottom, right] * (x - left)
    return upper * (1 - (y - top)) + lower * (y - top)


class Taps(NamedTuple):
    """Which pixels along one axis a bin reads: `weights` (K, bins, n) for n pixels from `first` (K, bins) on."""

    first: Tensor
    weights: Tensor

    def indices(self, size: int) -> Tensor:
        """(K, bins, n); those that reach beyond the map have no weight."""
        span = torch.arange(self.weights.shape[2], device=self.first.device)
        return (self.first[..., None] + span).clamp_(max=size - 1)

    def matrix(self, size: int) -> Tensor:
        """(K, bins, size)."""
        return self.weights.new_zeros(*self.first.shape, size).scatter_add_(2, self.indices(size), self.weights)


def roi_align(
    maps: Tensor,
    regions: Tensor,
    output_size: tuple[int, int],
    *,
    scale: float = 1.0,
    samples: int = -1,
    aligned: bool = False,
) -> Tensor:
    """Regions (K, 5) of maps (B, C, H, W) as (K, C, *output_size); `regions` gets no gradient.

    With `samples` of 0 or less each region takes as many as it has pixels per bin. As `roi_align_reference`: the mean
    of a bin's samples is a weighted sum of pixels whose weights are a product of one factor per axis.
    """
    if maps.is_meta or not len(regions):
        return maps.new_zeros(len(regions), maps.shape[1], *output_size) + 0 * maps.sum()
    values = maps.float() if maps.dtype in (torch.float16, torch.bfloat16) else maps
    with torch.no_grad():
        boxes = regions[:, 1:].to(values.dtype) * scale - (0.5 if aligned else 0.0)
        sides = boxes[:, 2:] - boxes[:, :2]
        sides = sides if aligned else sides.clamp(min=1)
        columns, rows = (
            axis_taps(boxes[:, axis], sides[:, axis], output_size[1 - axis], maps.shape[3 - axis], samples)
            for axis in (0, 1)
        )
    images = regions[:, 0].long()
    form = pool_by_products if maps.shape[1] <= FEW_CHANNELS else pool_by_gathering
    return form(values, images, rows, columns).to(maps.dtype)


def axis_taps(start: Tensor, extent: Tensor, bins: int, size: int, samples: int) -> Taps:
    """The factors of one axis. Samples more than a pixel outside count as zeros in the mean."""
    step = (extent / bins)[:, None, None]
    count = torch.full_like(step, samples) if samples > 0 else step.ceil()
    index = torch.arange(max(int(count.max()), 1), device=start.device)
    bin = torch.arange(bins, device=start.device)[:, None]
    at = start[:, None, None] + bin * step + (index + 0.5) * step / count
    used = (index < count) & (at >= -1) & (at <= size)
    at = torch.where(used, at, 0).clamp_(0, size - 1)  # (K, bins, samples)
    low = at.long()
    high = (low + 1).clamp_(max=size - 1)
    share, fraction = used / count.clamp(min=1), at - low
    first = low.masked_fill(~used, size - 1).amin(2)
    span = int((high.masked_fill(~used, 0).amax(2) - first).max().clamp_(min=0)) + 1
    weights = at.new_zeros(*first.shape, span)
    for pixel, weight in ((low, share * (1 - fraction)), (high, share * fraction)):
        weights.scatter_add_(2, (pixel - first[..., None]).clamp_(0, span - 1), weight)
    return Taps(first, weights)


def pool_by_products(values: Tensor, images: Tensor, rows: Taps, columns: Taps) -> Tensor:
    """Rows of each map, then columns of what is left, each as a product with the factors as a matrix."""
    height, width = values.shape[-2:]
    down, across = rows.matrix(height), columns.matrix(width)
    order = images.argsort(stable=True)
    counts = torch.bincount(images, minlength=len(values)).tolist()
    pooled = []
    for value, own in zip(values, order.split(counts), strict=True):
        if len(own):
            kept = down[own].flatten(0, 1) @ value  # (C, own * bins, W)
            kept = kept.unflatten(1, (len(own), -1)).transpose(0, 1)  # (own, C, bins, W)
            pooled.append(kept @ across[own].transpose(1, 2)[:, None])
    return torch.cat(pooled)[order.argsort()]


def pool_by_gathering(values: Tensor, images: Tensor, rows: Taps, columns: Taps) -> Tensor:
    """A weighted sum of the pixels that each bin reads, all of a pixel's channels at once."""
    _, channels, height, width = values.shape
    down = (images[:, None, None] * height + rows.indices(height)) * width
    places = down[:, :, None, :, None] + columns.indices(width)[:, None, :, None, :]  # (K, bins, bins, n, m)
    weights = rows.weights[:, :, None, :, None] * columns.weights[:, None, :, None, :]
    used = weights != 0
    counts = used.flatten(3).sum(3).flatten()
    pixels = values.permute(0, 2, 3, 1).reshape(-1, channels)
    pooled = F.embedding_bag(
        places[used], pixels, counts.cumsum(0) - counts, mode="sum", per_sample_weights=weights[used]
    )
    return pooled.view(*places.shape[:3], channels).permute(0, 3, 1, 2)
