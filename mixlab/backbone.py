"""The whole data flow, top to bottom: image, stem, stages of blocks, norm and pooling, head."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mixlab.config import MIN_SIDE, ModelConfig
from mixlab.errors import ConfigError, ImageError, near_misses
from mixlab.grid import Grid
from mixlab.guards import check_cpu_precision
from mixlab.heads import POOLS, classifier, head
from mixlab.init import initialise
from mixlab.layers import SCALINGS, Branch, Mlp, Residual, activation, norm
from mixlab.mixers import MIXERS, BlockParts, Mixer
from mixlab.modules import Modules
from mixlab.stems import Stem, stem

Visit = Callable[[str, Tensor, Grid], None]


class Block(nn.Module):
    """A position term on the residual stream, token mixing, channel mixing; the first and the last are optional."""

    def __init__(self, position: nn.Module | None, token: Residual, channel: Residual | None) -> None:
        super().__init__()
        self.position = position
        self.token = token
        self.channel = channel

    @property
    def mixer(self) -> Mixer:
        """The (first) token mixer."""
        return cast(Mixer, self.token.branches[0].mixer)

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        if self.position is not None:
            tokens = self.position(tokens, grid)
        tokens = self.token(tokens, grid)
        return tokens if self.channel is None else self.channel(tokens, grid)


class Stage(nn.Module):
    """Blocks of one width on one grid. It owns its class tokens and whatever its blocks share."""

    def __init__(self, downsample: Stem | None, blocks: Iterable[Block], shared: nn.Module | None) -> None:
        super().__init__()
        self.downsample = downsample
        self.class_token: nn.Parameter | None = None
        self.shared = shared
        self.blocks: Modules[Block] = Modules(blocks)
        self.checkpointing = False

    def forward(self, tokens: Tensor, grid: Grid, visit: Visit | None = None) -> tuple[Tensor, Grid]:
        tokens, grid = self.enter(tokens, grid)
        for index, block in enumerate(self.blocks):
            if self.checkpointing and torch.is_grad_enabled():
                tokens = checkpoint(block, tokens, grid, use_reentrant=False)
            else:
                tokens = block(tokens, grid)
            if visit is not None:
                visit(f".blocks.{index}", tokens, grid)
        return tokens, grid

    def enter(self, tokens: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
        """Coarser tokens behind this stage's own class tokens; those of the stage before end here."""
        if self.downsample is not None:
            tokens, grid = self.downsample(grid.to_map(tokens))
        if self.class_token is not None:
            prefix = self.class_token.to(tokens.dtype).expand(len(tokens), -1, -1)
            tokens = torch.cat([prefix, tokens], 1)
            grid = Grid(grid.height, grid.width, prefix.shape[1])
        return tokens, grid


class Backbone(nn.Module):
    """A vision backbone. Build one with `mixlab.create_model`.

    `strides` and `channels` describe the maps of `pyramid`; `reference_grids` are the stages' grids at the
    config's own image size.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.class_names: tuple[str, ...] = ()
        self.channels = config.dims
        self.stem = stem(config.stem, config.in_channels, config.dims[0])
        grid, strides, grids = self.stem.grid_after(Grid(*config.image_size)), [self.stem.stride], []
        rates = iter(config.drop_path.rates(sum(config.depths)))
        self.stages: Modules[Stage] = Modules()
        for index, dim in enumerate(config.dims):
            downsample = None
            if index:
                downsample = stem(config.downsample[index - 1], config.dims[index - 1], dim)
                grid = downsample.grid_after(grid)
                strides.append(strides[-1] * downsample.stride)
            grids.append(Grid(grid.height, grid.width, config.class_tokens[index]))
            self.stages.append(build_stage(config, index, grids[-1], downsample, rates))
        self.strides, self.reference_grids = tuple(strides), tuple(grids)
        self.norm = nn.LayerNorm(config.dims[-1], eps=config.final_norm_eps)
        self.pool = POOLS.builder(config.pool)
        self.head = head(config.head, config.dims[-1], config.num_classes)
        initialise(self, config.init)

    def forward(self, image: Tensor) -> Tensor:
        """Class scores (B, num_classes) of normalised images (B, C, H, W)."""
        return self.head(self.embed(image))

    def embed(self, image: Tensor) -> Tensor:
        """Pooled, final-normed features (B, C): what the head sees."""
        tokens, grid = self.features(image)
        if self.config.final_norm == "before_pool":
            return self.pool(self.norm(tokens), grid)
        return self.norm(self.pool(tokens, grid))

    def features(self, image: Tensor, visit: Visit | None = None) -> tuple[Tensor, Grid]:
        """The last stage's tokens; `visit(name, tokens, grid)` sees the output of every named place."""
        check_image(image, self.config)
        tokens, grid = self.stem(image)
        if visit is not None:
            visit("stem", tokens, grid)
        for index, stage in enumerate(self.stages):
            inner = None if visit is None else inside(f"stages.{index}", visit)
            tokens, grid = stage(tokens, grid, inner)
            if visit is not None:
                visit(f"stages.{index}", tokens, grid)
        return tokens, grid

    def pyramid(self, image: Tensor) -> list[Tensor]:
        """One NCHW map per stage, at the strides and channels that the model states."""
        names = [f"stages.{index}" for index in range(len(self.stages))]
        return list(self.intermediates(image, names).values())

    def intermediates(self, image: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
        """The NCHW maps behind named places (see `intermediate_names`), in the order asked for."""
        wanted = list(names)
        for name in wanted:
            if name not in self.intermediate_names:
                raise ConfigError(
                    f"{self.config.name!r} has no intermediate {name!r}. {near_misses(name, self.intermediate_names)}"
                )
        found: dict[str, Tensor] = {}

        def keep(name: str, tokens: Tensor, grid: Grid) -> None:
            if name in wanted:
                found[name] = grid.to_map(tokens)

        self.features(image, keep)
        return {name: found[name] for name in wanted}

    def set_activation_checkpointing(self, on: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        for stage in self.stages:
            stage.checkpointing = on

    def reset_classifier(self, num_classes: int) -> None:
        """Replace the last linear layer by a fresh one; 0 classes leave the features in front of it."""
        config = replace(self.config, num_classes=num_classes)
        like = next(self.head.parameters(), self.norm.weight)
        self.head.classifier = classifier(self.head.width, num_classes).to(like.device, like.dtype)
        initialise(self.head.classifier, config.init)
        self.config, self.class_names = config, ()

    # -- facts that other code relies on instead of guessing -------------------------------------

    @property
    def intermediate_names(self) -> tuple[str, ...]:
        """Places with an output, in the order of the data flow."""
        names = ["stem"]
        for index, stage in enumerate(self.stages):
            names += [f"stages.{index}.blocks.{block}" for block in range(len(stage.blocks))]
            names.append(f"stages.{index}")
        return tuple(names)

    @property
    def layer_order(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Layers from the image to the head, each with the names of its parameters; every parameter is in one.

        What a stage has beside its blocks (downsampling, class tokens, shared parts) belongs to its first block.
        """
        groups: dict[str, list[str]] = {}
        for name, _ in self.named_parameters():
            groups.setdefault(self.layer_of(name), []).append(name)
        order = ["stem", *(name for name in self.intermediate_names if ".blocks." in name), "head"]
        return tuple((name, tuple(groups.get(name, ()))) for name in order)

    def layer_of(self, parameter: str) -> str:
        """The layer in `layer_order` that a parameter belongs to."""
        top, *rest = parameter.split(".")
        if top != "stages":
            return "stem" if top == "stem" else "head"
        return f"stages.{rest[0]}.blocks.{rest[2] if rest[1] == 'blocks' else 0}"

    @property
    def no_decay(self) -> frozenset[str]:
        """Parameters that weight decay must not touch: scales, biases, norms and class tokens."""
        named = self.named_parameters()
        return frozenset(name for name, p in named if p.ndim <= 1 or name.endswith("class_token"))

    @property
    def class_activation(self) -> tuple[nn.Module, Callable[[tuple[Tensor, Grid]], Tensor]]:
        """The module whose output a class-activation map weighs, and what turns that output into an NCHW map."""
        return self.stages[-1], lambda output: output[1].to_map(output[0])

    @property
    def explanations(self) -> dict[str, tuple[str, ...]]:
        """What the mixer of each block can show about itself; ask for it with `explain`."""
        return {
            f"stages.{index}.blocks.{position}": block.mixer.explains
            for index, stage in enumerate(self.stages)
            for position, block in enumerate(stage.blocks)
            if block.mixer.explains
        }

    @torch.no_grad()
    def explain(self, image: Tensor, block: str) -> dict[str, Tensor]:
        """What the mixer of a block shows about itself on these images: attention, kernels, a matrix."""
        if block not in self.explanations:
            raise ConfigError(f"Nothing to explain at {block!r}. {near_misses(block, self.explanations)}")
        seen: dict[str, Tensor] = {}
        mixer = cast(Block, self.get_submodule(block)).mixer

        def look(module: nn.Module, inputs: tuple[Tensor, Grid]) -> None:
            seen.update(mixer.explain(*inputs))

        handle = mixer.register_forward_pre_hook(look)
        try:
            self.features(image)
        finally:
            handle.remove()
        return seen


def check_image(image: Tensor, config: ModelConfig) -> None:
    """Raise for a tensor that is not a batch of images this model takes."""
    expected = f"a float batch (B, {config.in_channels}, H, W) with sides of {MIN_SIDE} px or more"
    if image.ndim != 4:
        raise ImageError(f"{config.name!r} takes {expected}; got shape {tuple(image.shape)}. Add a batch dimension?")
    if image.shape[1] != config.in_channels:
        raise ImageError(
            f"{config.name!r} takes {expected}; got {image.shape[1]} channels. Convert the images, or build the "
            f"model for them: create_model({config.name!r}, in_channels={image.shape[1]})."
        )
    if image.shape[2] < MIN_SIDE or image.shape[3] < MIN_SIDE:
        raise ImageError(
            f"{config.name!r} takes {expected}; got {image.shape[2]} x {image.shape[3]} px. Enlarge the images first."
        )
    if not image.is_floating_point():
        raise ImageError(f"{config.name!r} takes {expected}; got {image.dtype}. Scale to [0, 1] and normalise first.")
    if image.device.type == "cpu":
        check_cpu_precision(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else image.dtype)


def inside(place: str, visit: Visit) -> Visit:
    """A visitor for names relative to a place."""
    return lambda name, tokens, grid: visit(place + name, tokens, grid)


def build_stage(config: ModelConfig, index: int, grid: Grid, downsample: Stem | None, rates: Iterator[float]) -> Stage:
    """A stage from its mixer's parts; `rates` yields one drop rate per block."""
    choice, dim, depth = config.mixer(index), config.dims[index], config.depths[index]
    parts = MIXERS.builder(choice)(choice.options, dim, depth, grid)
    blocks = [build_block(config, index, block, next(rates)) for block in parts.blocks]
    stage = Stage(downsample, blocks, parts.shared)
    if grid.prefix:
        stage.class_token = nn.Parameter(torch.empty(1, grid.prefix, dim))
        nn.init.trunc_normal_(stage.class_token, std=0.02)
    return stage


def build_block(config: ModelConfig, index: int, parts: BlockParts, rate: float) -> Block:
    dim = config.dims[index]

    def residual(mixers: Iterable[nn.Module]) -> Residual:
        scale = config.branch_scale[index]
        return Residual(
            [Branch(norm(config.norm, dim, bias=config.bias), mixer) for mixer in mixers],
            SCALINGS.builder(scale)(dim, **vars(scale.options)),
            drop_rate=rate,
            skip=config.drop_path.form == "skip",
        )

    own_channel_mixing = all(mixer.mixes_channels for mixer in parts.branches)
    has_mlp = not own_channel_mixing if config.channel_mlp is None else config.channel_mlp
    hidden = int(config.mlp_ratio[index] * dim)
    mlp = Mlp(dim, hidden, activation(config.activation), bias=config.bias) if has_mlp else None
    return Block(parts.position, residual(parts.branches), None if mlp is None else residual([mlp]))
