"""From a checked config to a model: parts are made first and handed in."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from mixlab.core.errors import ConfigError, require
from mixlab.core.grid import Grid
from mixlab.models.backbone import Backbone, Block, Stage
from mixlab.models.config import ModelConfig
from mixlab.models.coscale import CoscaleBlock, CoscaleGroup
from mixlab.models.heads import Readout, pool
from mixlab.models.layers import SCALINGS, Branch, Mlp, Residual, activation, norm
from mixlab.models.mixers import MIXERS, BlockParts, Shared, StageParts
from mixlab.models.position import PositionTable
from mixlab.models.stems import Stem, stem

Built = TypeVar("Built", bound=Backbone)


def build(config: ModelConfig) -> Backbone:
    """Build the model that a config describes, with fresh weights."""
    return build_as(Backbone, config)


def build_as(kind: type[Built], config: ModelConfig) -> Built:
    """Build the model that a config describes as an instance of a subclass of Backbone."""
    first = stem(config.inherit(config.stem), config.in_channels, config.dims[0])
    grid, stages = first.grid_after(Grid(*config.image_size)), []
    rates = iter(config.drop_path.rates(sum(config.depths)))
    parallel: list[Sequence[BlockParts]] = []
    for index, (dim, depth) in enumerate(zip(config.dims, config.depths, strict=True)):
        downsample = stem(config.downsample[index - 1], config.dims[index - 1], dim) if index else None
        grid = grid if downsample is None else downsample.grid_after(grid)
        require(grid.height > 0 and grid.width > 0, f"a grid in every stage of {config.name!r}; got {grid}.")
        parts = build_parts(config, index, Grid(grid.height, grid.width, config.class_tokens[index]))
        stages.append(build_stage(config, index, grid, parts, downsample, rates))
        parallel += [parts.blocks[depth:]] if len(parts.blocks) > depth else []
    readout = Readout(
        pool(config.pool, config.class_tokens[-1]),
        config.dims[-1],
        scales=config.coscale.scales if config.coscale else 1,
        norm_first=config.final_norm == "before_pool",
        eps=config.final_norm_eps,
    )
    if readout.pool.reads_class_tokens:
        check_class_tokens(config, stages)
    return kind(config, first, stages, build_coscale(config, parallel), readout)


def check_class_tokens(config: ModelConfig, stages: Sequence[Stage]) -> None:
    """Raise unless class tokens that are read have seen the image, through their mixer or an exchange of scales."""
    read = stages[-(config.coscale.scales if config.coscale else 1) :]
    seeing = [any(mixer.mixes_class_tokens for block in stage.blocks for mixer in block.mixers) for stage in read]
    exchanged = config.coscale is not None and config.coscale.exchange != "none"
    if not (any(seeing) if exchanged else all(seeing)):
        raise ConfigError(
            "pool 'class_token' reads class tokens that never see the image: the mixer of that stage is purely "
            "spatial. Use pool = 'mean', or a mixer such as attention there."
        )


def build_parts(config: ModelConfig, index: int, grid: Grid) -> StageParts:
    """Make a mixer's parts for the blocks of a stage, followed by those for the parallel blocks on its scale."""
    choice, depth = config.mixer(index), config.depths[index]
    if config.coscale is not None and index >= len(config.dims) - config.coscale.scales:
        depth += config.coscale.blocks
    parts = MIXERS.builder(choice)(choice.options, config.dims[index], depth, grid)
    if len(parts.blocks) != depth:
        raise ConfigError(f"Mixer {choice.name!r} made {len(parts.blocks)} blocks where {depth} were asked for.")
    return parts


def build_stage(
    config: ModelConfig, index: int, grid: Grid, parts: StageParts, downsample: Stem | None, rates: Iterator[float]
) -> Stage:
    """Build a stage from the first parts of its mixer; `rates` yields one drop rate per block."""
    dim, class_tokens = config.dims[index], config.class_tokens[index]
    blocks = [build_block(config, index, block, next(rates)) for block in parts.blocks[: config.depths[index]]]
    return Stage(
        blocks,
        downsample=downsample,
        class_token=build_class_token(class_tokens, dim) if class_tokens else None,
        position=build_position(config, grid) if config.position_embedding and index == 0 else None,
        shared=parts.shared,
        blocks_per_layer=parts.blocks_per_layer,
    )


def build_position(config: ModelConfig, grid: Grid) -> PositionTable:
    return PositionTable(grid, config.dims[0], class_tokens=config.class_tokens[0] if config.class_position else 0)


def build_class_token(count: int, dim: int) -> nn.Parameter:
    token = nn.Parameter(torch.empty(1, count, dim))
    nn.init.trunc_normal_(token, std=0.02)
    return token


def build_block(config: ModelConfig, index: int, parts: BlockParts, rate: float) -> Block:
    mixes_channels = all(mixer.mixes_channels for mixer in parts.branches)
    has_mlp = not mixes_channels if config.channel_mlp is None else config.channel_mlp
    channel = build_residual(config, index, [build_mlp(config, index)], rate) if has_mlp else None
    return Block(parts.position, build_residual(config, index, parts.branches, rate), channel)


def build_mlp(config: ModelConfig, index: int) -> Mlp:
    dim = config.dims[index]
    hidden = max(1, int(config.mlp_ratio[index] * dim))
    return Mlp(dim, hidden, activation(config.activation), bias=config.bias)


def build_residual(
    config: ModelConfig, index: int, mixers: Iterable[Callable[[Tensor, Grid], Tensor]], rate: float
) -> Residual:
    dim, scale = config.dims[index], config.branch_scale[index]
    branches = [Branch(norm(config.norm, dim, bias=config.bias), mixer) for mixer in mixers]
    scaling = SCALINGS.builder(scale)(dim, **vars(scale.options))
    return Residual(branches, scaling, drop_rate=rate, skip=config.drop_path.form == "skip")


def build_coscale(config: ModelConfig, parallel: Sequence[Sequence[BlockParts]]) -> CoscaleGroup | None:
    """Build the parallel blocks from the parts that the mixers of the coarser stages made for them."""
    if config.coscale is None:
        return None
    first, rate = len(config.dims) - config.coscale.scales, config.drop_path.rate
    blocks = []
    for parts in zip(*parallel, strict=True):
        if config.coscale.exchange == "direct" and not all(mixer.crosses for part in parts for mixer in part.branches):
            raise ConfigError("coscale exchange 'direct' needs a mixer that can look across scales: convattention.")
        if any(mixer.mixes_channels for part in parts for mixer in part.branches) and config.channel_mlp is None:
            raise ConfigError("coscale shares one MLP between its scales, but a mixer there mixes channels itself.")
        mlp = build_mlp(config, first)
        token = [build_residual(config, first + at, part.branches, rate) for at, part in enumerate(parts)]
        channel = [build_residual(config, first + at, [Shared(mlp)], rate) for at in range(len(parts))]
        positions = [part.position for part in parts]
        blocks.append(CoscaleBlock(positions, token, channel, mlp, config.coscale.exchange))
    return CoscaleGroup(blocks, config.coscale.scales)
