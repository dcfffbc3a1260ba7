"""The whole model in the order of the data flow: stem, stages of blocks, co-scale step, readout, head."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from mixlab.core.grid import Grid
from mixlab.engine.backends.convattention import WINDOWS, with_itself
from mixlab.engine.draft import CannotLower, Draft, Tokens
from mixlab.engine.lowering import layers
from mixlab.engine.lowering.base import lower
from mixlab.engine.lowering.convolution import depthwise_weights
from mixlab.engine.lowering.stems import downsample
from mixlab.engine.steps import Place
from mixlab.models.backbone import Backbone, Block, Stage
from mixlab.models.layers import Branch, Mlp, Residual
from mixlab.models.mixers.convattention import ConvPosition
from mixlab.models.position import PositionTable

Position = Callable[[Tensor, Grid], Tensor]


def or_call(draft: Draft, module: Any, tokens: Tokens, lower: Callable[[Draft, Any, Tokens], Place]) -> Tokens:
    """A part as steps, or as a call of PyTorch with the reason."""
    mark, path = draft.mark(), draft.path(module)
    try:
        with draft.part(path):
            return tokens._replace(place=lower(draft, module, tokens))
    except CannotLower as reason:
        draft.rewind(mark)
        draft.pytorch(path, str(reason))
    place = draft.call(lambda x: module(x, tokens.grid), tokens.shape, (tokens.place, tokens.shape))
    return tokens._replace(place=place)


def residual_or_call(draft: Draft, module: Residual, tokens: Tokens) -> Tokens:
    return or_call(draft, module, tokens, layers.residual)


def positioned(draft: Draft, step: Position | None, tokens: Tokens) -> Tokens:
    """Tokens after the position step of a block, if it has one."""
    return tokens if step is None else or_call(draft, step, tokens, position)


def position(draft: Draft, step: Any, tokens: Tokens) -> Place:
    """Image tokens plus a depthwise convolution over them."""
    module, grid, channels = draft.shared(step), tokens.grid, tokens.channels
    draft.exactly(module, ConvPosition)
    assert isinstance(module, ConvPosition)
    draft.require(not grid.prefix, "class tokens pass")
    weight, bias = depthwise_weights(draft, module.conv, channels)
    height, width = weight.shape[2:]
    draft.require(height == width and width in WINDOWS, f"there is no kernel for windows of {height} x {width}")
    summed = draft.derived(module, ("with_itself",), [weight], lambda: with_itself(weight.detach()))
    out = draft.claim(tokens.rows * channels)
    draft.depthwise((summed, bias), tokens.size, (height // 2, width // 2), tokens.place, out)
    return out


def block(draft: Draft, module: nn.Module, tokens: Tokens) -> Tokens:
    """A position step, token mixing, channel mixing."""
    mark, path = draft.mark(), draft.path(module)
    try:
        draft.exactly(module, Block)
        assert isinstance(module, Block)
    except CannotLower as reason:
        draft.rewind(mark)
        draft.pytorch(path, str(reason))
        place = draft.call(lambda x: module(x, tokens.grid), tokens.shape, (tokens.place, tokens.shape))
        return tokens._replace(place=place)
    tokens = positioned(draft, module.position, tokens)
    tokens = residual_or_call(draft, module.token, tokens)
    return tokens if module.channel is None else residual_or_call(draft, module.channel, tokens)


def stage(draft: Draft, module: nn.Module, tokens: Tokens, *, name: str, channels: int, visited: bool) -> Tokens:
    """The step that makes tokens coarser, class tokens, positions, and the blocks."""
    mark = draft.mark()
    try:
        draft.exactly(module, Stage)
    except CannotLower as reason:
        if visited or not isinstance(module, Stage):
            raise
        draft.rewind(mark)
        return called(draft, module, tokens, channels, str(reason))
    assert isinstance(module, Stage)
    draft.watch(module.blocks)
    tokens = entered(draft, module, tokens)
    for index, part in enumerate(module.blocks):
        tokens = block(draft, part, tokens)
        if visited:
            draft.tell(f"{name}.blocks.{index}", tokens)
    return tokens


def called(draft: Draft, module: Stage, tokens: Tokens, channels: int, reason: str) -> Tokens:
    """A whole stage by PyTorch."""
    draft.pytorch(draft.path(module), reason)
    before = tokens.grid
    after = before if module.downsample is None else module.downsample.grid_after(before)
    prefix = 0 if module.class_token is None else module.class_token.shape[1]
    grid = Grid(after.height, after.width, prefix)
    shape = (tokens.images, grid.tokens, channels)
    place = draft.call(lambda x: module(x, before)[0], shape, (tokens.place, tokens.shape))
    return Tokens(place, tokens.images, grid, channels)


def entered(draft: Draft, module: Stage, tokens: Tokens) -> Tokens:
    """Tokens in front of the first block of a stage."""
    if module.downsample is not None:
        tokens = downsample(draft, module.downsample, tokens)
    if module.class_token is not None:
        tokens = with_class_tokens(draft, module, tokens)
    if module.position is not None:
        tokens = or_call(draft, module.position, tokens, position_table)
    return tokens


def with_class_tokens(draft: Draft, module: Stage, tokens: Tokens) -> Tokens:
    """Learned tokens in front of those of every image."""
    assert module.class_token is not None
    channels, images = tokens.channels, tokens.images
    vector = draft.tensor(module.class_token, *module.class_token.shape)
    count = vector.shape[1]
    grid = Grid(tokens.grid.height, tokens.grid.width, count)
    out = draft.claim(images * grid.tokens * channels)
    strides = (grid.tokens * channels, channels)
    with draft.part(f"{draft.path(module)}.class_token"):
        draft.put(vector, out, (images, count, channels), (0, channels), strides)
        rows = tokens.grid.tokens
        draft.put(
            tokens.place, out.at(count * channels), (images, rows, channels), (rows * channels, channels), strides
        )
    return Tokens(out, images, grid, channels)


def position_table(draft: Draft, module: Any, tokens: Tokens) -> Place:
    """Tokens plus a learned vector for each place of the grid."""
    draft.exactly(module, PositionTable)
    grid, channels = tokens.grid, tokens.channels
    draft.require(not grid.prefix and module.prefix is None, "class tokens have positions of their own")
    table = draft.tensor(module.table)
    if tuple(table.shape[1:3]) != (grid.height, grid.width):
        table = draft.derived(module, ("table", grid), [table], lambda: module.table_for(grid).detach().contiguous())
    out, strides = draft.claim(tokens.rows * channels), (grid.tokens * channels, channels)
    draft.put(tokens.place, out, (tokens.images, grid.tokens, channels), strides, strides, table, (0, channels))
    return out


def features(draft: Draft, model: Backbone, image: Place, shape: tuple[int, ...], *, visited: bool) -> list[Tokens]:
    """The tokens of every stage."""
    from mixlab.engine.lowering import coscale, stems

    draft.watch(model.stages)
    tokens = stems.stem(draft, model.stem, image, shape)
    if visited:
        draft.tell("stem", tokens)
    outputs = []
    for index, part in enumerate(model.stages):
        tokens = stage(draft, part, tokens, name=f"stages.{index}", channels=model.config.dims[index], visited=visited)
        if visited:
            draft.tell(f"stages.{index}", tokens)
        outputs.append(tokens)
    return outputs if model.coscale is None else coscale.group(draft, model.coscale, outputs, visited=visited)


def alone(draft: Draft, part: nn.Module, tokens: Tokens) -> Place:
    """A block, a branch or an MLP by itself."""
    draft.require(type(part) in (Block, Branch, Mlp), f"{type(part).__name__} is not known to the engine")
    if isinstance(part, Block):
        return block(draft, part, tokens).place
    draft.require(tokens.rows >= layers.FEWEST, f"there are fewer than {layers.FEWEST} rows")
    if isinstance(part, Branch):
        return layers.branch(draft, part, tokens, None)
    return lower(draft, part, tokens.place, tokens, None)
