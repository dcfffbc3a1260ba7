"""The image as tokens, and the step between two stages."""

from mixlab.core.grid import Grid
from mixlab.engine.draft import Draft, Tokens
from mixlab.engine.steps import Place
from mixlab.models.stems import ConvolutionalStem, Downsample, Stem


def stem(draft: Draft, module: Stem, image: Place, shape: tuple[int, ...]) -> Tokens:
    """Tokens of images (B, C, H, W)."""
    grid = module.grid_after(Grid(shape[2], shape[3]))
    channels = channels_after(draft, module)
    draft.pytorch(draft.path(module), "there are no kernels for dense convolutions")
    out = draft.call(lambda image: module(image)[0], (shape[0], grid.tokens, channels), (image, shape))
    return Tokens(out, shape[0], grid, channels)


def downsample(draft: Draft, module: Stem, tokens: Tokens) -> Tokens:
    """Tokens on a coarser grid; class tokens end here."""
    before = tokens.grid
    grid, channels = module.grid_after(before), channels_after(draft, module)
    draft.pytorch(draft.path(module), "there are no kernels for dense convolutions")
    shape = (tokens.images, grid.tokens, channels)
    out = draft.call(lambda x: module(before.to_map(x))[0], shape, (tokens.place, tokens.shape))
    return Tokens(out, tokens.images, grid, channels)


def channels_after(draft: Draft, module: Stem) -> int:
    draft.require(
        type(module) in (Downsample, ConvolutionalStem), f"{type(module).__name__} is not known to the engine"
    )
    last = module.layers[-1] if isinstance(module, ConvolutionalStem) else module
    return last.conv.out_channels
