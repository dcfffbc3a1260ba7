"""The image as tokens, and the step between two stages: patches of a map, and a product with the kernels."""

from typing import NamedTuple

from torch import Tensor, nn

from mixlab.core.grid import Grid
from mixlab.engine.draft import CannotLower, Draft, Tokens
from mixlab.engine.kernels.tokens import Patch
from mixlab.engine.lowering.layers import activation, layer_norm
from mixlab.engine.steps import Place, Weights
from mixlab.models.stems import ConvolutionalStem, Downsample, Stem

MOST = 2**20  # numbers of the patches that lie in memory at a time


class Map(NamedTuple):
    """Maps in a place, and how far it is from an image, a row, a column and a channel to the next."""

    place: Place
    images: int
    grid: Grid
    channels: int
    strides: tuple[int, int, int, int]

    @property
    def channels_first(self) -> bool:
        return self.strides[3] != 1


def map_of(tokens: Tokens) -> Map:
    """Image tokens as maps; class tokens are passed over."""
    row, grid = tokens.channels, tokens.grid
    strides = (grid.tokens * row, grid.width * row, row, 1)
    return Map(tokens.place.at(grid.prefix * row), tokens.images, Grid(*grid[:2]), row, strides)


def image_map(image: Place, shape: tuple[int, ...]) -> Map:
    images, channels, height, width = shape
    strides = (channels * height * width, width, 1, height * width)
    return Map(image, images, Grid(height, width), channels, strides)


def stem(draft: Draft, module: Stem, image: Place, shape: tuple[int, ...]) -> Tokens:
    """Tokens of images (B, C, H, W)."""
    grid, channels = module.grid_after(Grid(shape[2], shape[3])), channels_after(draft, module)
    mark, path = draft.mark(), draft.path(module)
    try:
        with draft.part(path):
            return convolutions(draft, module, image_map(image, shape))
    except CannotLower as reason:
        draft.rewind(mark)
        draft.pytorch(path, str(reason))
    out = draft.call(lambda image: module(image)[0], (shape[0], grid.tokens, channels), (image, shape))
    return Tokens(out, shape[0], grid, channels)


def downsample(draft: Draft, module: Stem, tokens: Tokens) -> Tokens:
    """Tokens on a coarser grid; class tokens end here."""
    before = tokens.grid
    grid, channels = module.grid_after(before), channels_after(draft, module)
    mark, path = draft.mark(), draft.path(module)
    try:
        with draft.part(path):
            return convolutions(draft, module, map_of(tokens))
    except CannotLower as reason:
        draft.rewind(mark)
        draft.pytorch(path, str(reason))
    shape = (tokens.images, grid.tokens, channels)
    out = draft.call(lambda x: module(before.to_map(x))[0], shape, (tokens.place, tokens.shape))
    return Tokens(out, tokens.images, grid, channels)


def channels_after(draft: Draft, module: Stem) -> int:
    draft.require(
        type(module) in (Downsample, ConvolutionalStem), f"{type(module).__name__} is not known to the engine"
    )
    last = module.layers[-1] if isinstance(module, ConvolutionalStem) else module
    return last.conv.out_channels


def convolutions(draft: Draft, module: Stem, source: Map) -> Tokens:
    """One convolution, or several with activations between them."""
    draft.exactly(module, Downsample, ConvolutionalStem)
    if isinstance(module, Downsample):
        return convolution(draft, module, source)
    draft.watch(module.layers)
    draft.watch(module.activations)
    *inner, last = module.layers
    for layer, act in zip(inner, module.activations, strict=True):
        after, _ = activation(draft, act)
        draft.require(after == "none", "there are no kernels for activations after a norm")
        source = map_of(convolution(draft, layer, source))
    return convolution(draft, last, source)


def convolution(draft: Draft, module: Downsample, source: Map) -> Tokens:
    """Tokens of a convolution with the norm before or after it."""
    draft.exactly(module, Downsample)
    norm, rows = module.norm, source.images * source.grid.tokens
    if norm is not None and module.norm_first:
        draft.require(not source.channels_first, "there is no kernel for a norm of channels that lie apart")
        about = layer_norm(draft, norm, source.channels)
        start, distance = source.strides[:2]
        draft.require(start == source.grid.height * distance, "class tokens lie between the images")
        place = draft.there(draft.norm(about, source.place, rows))
        source = source._replace(place=place)
    weights, patch = kernels_of(draft, module.conv, source)
    height, width = source.grid[:2]
    missing = (-height % patch.stride, -width % patch.stride) if module.patchify else (0, 0)
    grid, channels = Grid(*patch.outputs(height, width, missing)), len(weights[0])
    out = draft.claim(source.images * grid.tokens * channels)
    convolve(draft, weights, patch, source, grid, out)
    if norm is not None and not module.norm_first:
        about = layer_norm(draft, norm, channels)
        out = draft.there(draft.norm(about, out, source.images * grid.tokens))
    return Tokens(out, source.images, grid, channels)


def kernels_of(draft: Draft, conv: nn.Module, source: Map) -> tuple[Weights, Patch]:
    """The kernels of a dense convolution as rows of a product, and the patches that they meet."""
    draft.exactly(conv, nn.Conv2d)
    assert isinstance(conv, nn.Conv2d)
    (stride, across), dilation = conv.stride, conv.dilation
    usual = conv.groups == 1 and dilation == (1, 1) and stride == across and conv.padding_mode == "zeros"
    draft.require(usual and not isinstance(conv.padding, str), "a convolution is not a usual one")
    draft.require(conv.in_channels == source.channels, "a convolution takes other channels")
    high, wide = conv.kernel_size
    weight = draft.tensor(conv.weight, conv.out_channels, conv.in_channels, high, wide)
    bias = None if conv.bias is None else draft.tensor(conv.bias, conv.out_channels)
    patch = Patch(high, wide, stride, (int(conv.padding[0]), int(conv.padding[1])), source.channels_first)
    return (rows_of(draft, conv, weight, source.channels_first), bias), patch


def rows_of(draft: Draft, conv: nn.Conv2d, weight: Tensor, channels_first: bool) -> Tensor:
    """The weight (out, in, h, w) as (out, numbers of a patch) in the order of these."""
    if channels_first:
        flat = weight.detach().flatten(1)  # shares the memory
        draft.made.append(flat)
        return flat
    return draft.derived(conv, ("rows",), [weight], lambda: weight.detach().permute(0, 2, 3, 1).flatten(1).contiguous())


def convolve(draft: Draft, weights: Weights, patch: Patch, source: Map, grid: Grid, out: Place) -> None:
    """Patches and their product, of all images or of some rows at a time, so that patches need little memory."""
    size, channels = weights[0].shape[1], len(weights[0])
    if source.images * grid.tokens * size <= MOST:
        draft.patches(patch, source, (0, source.images), (0, grid.height), grid.width, weights, out)
        return
    band = max(1, MOST // (grid.width * size))
    for image in range(source.images):
        for row in range(0, grid.height, band):
            rows = (row, min(row + band, grid.height))
            place = out.at((image * grid.height + row) * grid.width * channels)
            draft.patches(patch, source, (image, image + 1), rows, grid.width, weights, place)
