"""The whole data flow, top to bottom: image, stem, stages of blocks, co-scale step, norm and pooling, head."""

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mixlab.core.choices import coerce
from mixlab.core.errors import ConfigError, ImageError, near_misses
from mixlab.core.grid import Grid
from mixlab.core.guards import autocast_dtype, check_precision
from mixlab.core.hooks import report, serve
from mixlab.core.parts import Part, in_one
from mixlab.models.config import MIN_SIDE, TWELFTHS, ModelConfig
from mixlab.models.coscale import CoscaleBlock, CoscaleGroup, Output, explain_branches
from mixlab.models.heads import Readout, head
from mixlab.models.init import initialize
from mixlab.models.layers import Residual
from mixlab.models.mixers import Mixer
from mixlab.models.model import Model
from mixlab.models.modules import Modules
from mixlab.models.position import PositionTable
from mixlab.models.stems import Stem

Visit = Callable[[str, Tensor, Grid], None]


class Block(Part):
    """A position step on the residual stream, token mixing, channel mixing; the first and the last are optional."""

    calls = ("position",)

    def __init__(
        self, position: Callable[[Tensor, Grid], Tensor] | None, token: Residual, channel: Residual | None
    ) -> None:
        super().__init__()
        self.position = position
        self.token = token
        self.channel = channel

    @in_one
    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        if self.position is not None:
            tokens = self.position(tokens, grid)
        tokens = self.token(tokens, grid)
        return tokens if self.channel is None else self.channel(tokens, grid)

    @property
    def mixers(self) -> list[Mixer]:
        """The token mixer of each branch."""
        return [cast(Mixer, branch.mixer) for branch in self.token.branches]

    def explain(self, tokens: Tensor, grid: Grid) -> dict[str, Tensor]:
        """What the mixers show for the tokens in front of this block; several branches are numbered."""
        if self.position is not None:
            tokens = self.position(tokens, grid)
        return explain_branches(self.token, tokens, grid)


class Stage(nn.Module):
    """Blocks of one width on one grid. It owns its class tokens, its position table and what its blocks share."""

    undecayed = ("class_token",)

    def __init__(
        self,
        blocks: Iterable[Block],
        *,
        downsample: Stem | None,
        class_token: nn.Parameter | None,
        position: PositionTable | None,
        shared: nn.Module | None,
        blocks_per_layer: int = 1,
    ) -> None:
        super().__init__()
        self.downsample = downsample
        self.class_token = class_token
        self.position = position
        self.shared = shared
        self.blocks: Modules[Block] = Modules(blocks)
        self.blocks_per_layer = blocks_per_layer
        self.checkpointing = False

    def forward(self, tokens: Tensor, grid: Grid, visit: Visit | None = None) -> Output:
        tokens, grid = self.enter(tokens, grid)
        for index, block in enumerate(self.blocks):
            if self.checkpointing and torch.is_grad_enabled():
                tokens = checkpoint(block, tokens, grid, use_reentrant=False)
            else:
                tokens = block(tokens, grid)
            if visit is not None:
                visit(f".blocks.{index}", tokens, grid)
        return tokens, grid

    def enter(self, tokens: Tensor, grid: Grid) -> Output:
        """Coarser tokens behind this stage's own class tokens; those of the stage before end here."""
        if self.downsample is not None:
            tokens, grid = self.downsample(grid.to_map(tokens))
        if self.class_token is not None:
            prefix = self.class_token.to(tokens.dtype).expand(tokens.shape[0], -1, -1)
            tokens = torch.cat([prefix, tokens], 1)
            grid = Grid(grid.height, grid.width, prefix.shape[1])
        if self.position is not None:
            tokens = self.position(tokens, grid)
        return tokens, grid


class Backbone(Model):
    """A vision backbone. Build one with `mixlab.create_model`.

    `strides` and `channels` describe the maps of `pyramid`; `reference_grids` are the stages' grids at the config's
    own image size.
    """

    def __init__(
        self, config: ModelConfig, stem: Stem, stages: Sequence[Stage], coscale: CoscaleGroup | None, readout: Readout
    ) -> None:
        super().__init__()
        self.config = config
        self.class_names: tuple[str, ...] = ()
        self.channels = config.dims * (len(config.taps) or 1)
        self.stem = stem
        self.stages: Modules[Stage] = Modules(stages)
        self.coscale = coscale
        self.readout = readout
        self.head = head(config.head, readout.width, config.num_classes)
        steps = [stem, *(stage.downsample for stage in stages if stage.downsample is not None)]
        self.strides = tuple(itertools.accumulate((step.stride for step in steps), operator.mul))
        self.strides *= len(config.taps) or 1
        self.reference_grids = self.grids(*config.image_size)
        initialize(self, config.init)

    @property
    def backbones(self) -> "list[Backbone]":
        """The model itself, which an ensemble has several of."""
        return [self]

    def grids(self, height: int, width: int) -> tuple[Grid, ...]:
        """The grid of each stage for images of this size."""
        grid, grids = self.stem.grid_after(Grid(height, width)), []
        for stage in self.stages:
            grid = grid if stage.downsample is None else stage.downsample.grid_after(grid)
            grids.append(Grid(grid.height, grid.width, 0 if stage.class_token is None else stage.class_token.shape[1]))
        return tuple(grids)

    def forward(self, image: Tensor) -> Tensor:
        """Class scores (B, num_classes) of normalised images (B, C, H, W)."""
        scores: Tensor | None = serve(self, "forward", image)
        return self.head(self.embed(image)) if scores is None else scores

    def embed(self, image: Tensor) -> Tensor:
        """Pooled, final-normed features (B, C): what the head sees."""
        pooled: Tensor | None = serve(self, "embed", image)
        return self.readout(self.features(image)) if pooled is None else pooled

    def features(self, image: Tensor, visit: Visit | None = None) -> list[Output]:
        """The tokens and grid of every stage; `visit(name, tokens, grid)` sees the output of every named place."""
        served: list[Output] | None = serve(self, "features", image, visit)
        if served is not None:
            return served
        self.check_image(image)
        tokens, grid = self.stem(image)
        if visit is not None:
            visit("stem", tokens, grid)
        outputs = []
        for index, stage in enumerate(self.stages):
            tokens, grid = stage(tokens, grid, None if visit is None else inside(f"stages.{index}", visit))
            if visit is not None:
                visit(f"stages.{index}", tokens, grid)
            outputs.append((tokens, grid))
        return outputs if self.coscale is None else self.coscale(outputs, visit)

    def engine_report(self, image: Tensor | None = None) -> Any:
        """What runs where when the model is called on such a batch for inference (by default one image of its own
        size), and why not elsewhere; None without an engine.
        """
        if image is None:
            image = torch.zeros(1, self.config.in_channels, *self.config.image_size)
        return report(self, image)

    def pyramid(self, image: Tensor) -> list[Tensor]:
        """One NCHW map per stage, or per tap of a single stage, at the strides and channels that the model states."""
        if self.config.taps:
            maps = self.intermediates(image, dict.fromkeys(self.pyramid_names))
            return [maps[name] for name in self.pyramid_names]
        return [grid.to_map(tokens) for tokens, grid in self.features(image)]

    @property
    def pyramid_names(self) -> tuple[str, ...]:
        """The intermediates that are the maps of `pyramid`."""
        if not self.config.taps:
            return tuple(f"stages.{index}" for index in range(len(self.stages)))
        depth = len(self.stages[0].blocks)
        return tuple(f"stages.0.blocks.{max(1, round(depth * tap / TWELFTHS)) - 1}" for tap in self.config.taps)

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
        if self.coscale is not None:
            self.coscale.checkpointing = on

    def reset_classifier(self, num_classes: int) -> None:
        """Replace the last linear layer by a fresh one; with 0 classes there is no head and the model gives `embed`."""
        config = replace(self.config, num_classes=coerce(num_classes, int, "number of classes"))
        like = self.readout.norms[0].weight
        if self.config.num_classes and num_classes:
            self.head.classifier = nn.Linear(self.head.width, num_classes).to(like.device, like.dtype)
            initialize(self.head.classifier, config.init, self.head)
        else:
            self.head = head(config.head, self.readout.width, num_classes).to(like.device, like.dtype)
            initialize(self.head, config.init)
        self.config, self.class_names = config, ()

    def check_image(self, image: Tensor) -> None:
        """Raise for anything that is not a batch of images this model takes."""
        name, channels = self.config.name, self.config.in_channels
        expected = f"{name!r} takes a float batch (B, {channels}, H, W) with sides of {MIN_SIDE} px or more"
        if not isinstance(image, Tensor):
            raise ImageError(f"{expected}; got a {type(image).__name__}. Convert it to a tensor first.")
        if image.ndim != 4:
            raise ImageError(f"{expected}; got shape {tuple(image.shape)}. For one image (C, H, W): image[None].")
        if image.shape[1] != channels:
            advice = f"Convert the images, or build the model: create_model({name!r}, in_channels={image.shape[1]})"
            if image.shape[3] == channels:
                advice = "Channels come second: image.permute(0, 3, 1, 2)"
            raise ImageError(f"{expected}; got {image.shape[1]} channels. {advice}.")
        if image.shape[2] < MIN_SIDE or image.shape[3] < MIN_SIDE:
            raise ImageError(f"{expected}; got {image.shape[2]} x {image.shape[3]} px. Enlarge the images first.")
        if not image.is_floating_point():
            raise ImageError(f"{expected}; got {image.dtype}. Scale to [0, 1] and normalise first.")
        dtype = self.readout.norms[0].weight.dtype
        if image.dtype is not dtype and autocast_dtype(image) is None:
            raise ImageError(f"{name!r} has weights in {dtype}; got images in {image.dtype}. Use image.to({dtype}).")
        check_precision(image)

    # -- facts that other code relies on instead of guessing -------------------------------------

    @property
    def blocks(self) -> dict[str, Block | CoscaleBlock]:
        """Every block by name, in the order of the data flow."""
        named: dict[str, Block | CoscaleBlock] = {
            f"stages.{index}.blocks.{position}": block
            for index, stage in enumerate(self.stages)
            for position, block in enumerate(stage.blocks)
        }
        if self.coscale is not None:
            named |= {f"coscale.blocks.{index}": block for index, block in enumerate(self.coscale.blocks)}
        return named

    @property
    def intermediate_names(self) -> tuple[str, ...]:
        """Places with an output, in the order of the data flow."""
        names = ["stem"]
        for index, stage in enumerate(self.stages):
            names += [f"stages.{index}.blocks.{block}" for block in range(len(stage.blocks))]
            names.append(f"stages.{index}")
        if self.coscale is not None:
            last = range(len(self.stages) - self.coscale.scales, len(self.stages))
            names += [f"coscale.blocks.{block}.{scale}" for block in range(len(self.coscale.blocks)) for scale in last]
        return tuple(names)

    @property
    def layer_order(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Layers from the image to the head, each with the names of its parameters; every parameter is in one.

        What a stage has beside its blocks (downsampling, class tokens, shared parts) belongs to its first block. Where
        a mixer asks for it (two mLSTM blocks, one each way), several blocks are one layer under the first one's name.
        """
        layer_of = {name: name for name in self.blocks}
        for index, stage in enumerate(self.stages):
            for block in range(len(stage.blocks)):
                first = block - block % stage.blocks_per_layer
                layer_of[f"stages.{index}.blocks.{block}"] = f"stages.{index}.blocks.{first}"
        owner = {id(p): layer_of[name] for name, block in self.blocks.items() for p in block.parameters()}
        owner |= {id(p): "stem" for p in self.stem.parameters()}
        for index, stage in enumerate(self.stages):
            owner = {id(p): f"stages.{index}.blocks.0" for p in stage.parameters()} | owner
        groups: dict[str, list[str]] = {name: [] for name in ("stem", *layer_of.values(), "head")}
        for name, parameter in self.named_parameters():
            groups[owner.get(id(parameter), "head")].append(name)
        return tuple((name, tuple(parameters)) for name, parameters in groups.items())

    @property
    def class_activation(self) -> tuple[nn.Module, Callable[[Tensor, tuple[int, int]], Tensor]]:
        """For class-activation maps: the module whose output they weigh, and what makes an NCHW map of that output.

        The function takes the output and the image's height and width.
        """

        def to_map(tokens: Tensor, image_size: tuple[int, int]) -> Tensor:
            return self.grids(*image_size)[-1].to_map(tokens)

        if not self.readout.pool.reads_whole_image:  # behind the last mixing most image tokens are not read any more
            last = self.stages[-1].blocks[-1].token if self.coscale is None else self.coscale.blocks[-1].token[-1]
            return last.branches[0].norm, to_map
        return (self.stages[-1].blocks[-1] if self.coscale is None else self.coscale.blocks[-1].channel[-1]), to_map

    @property
    def explanations(self) -> dict[str, tuple[str, ...]]:
        """What each block can show about itself; ask for it with `explain`."""
        told = {
            name: tuple(word for mixer in mixers for word in mixer.explains)
            for name, mixers in self.token_mixers.items()
        }
        return {name: words for name, words in told.items() if words}

    @property
    def token_mixers(self) -> dict[str, list[Mixer]]:
        """The mixers of every place that mixes tokens, one per branch; a co-scale block has a place per scale."""
        found = {}
        for name, block in self.blocks.items():
            if isinstance(block, Block):
                found[name] = block.mixers
            else:
                first = len(self.stages) - len(block.token)
                for scale, residual in enumerate(block.token, first):
                    found[f"{name}.{scale}"] = [cast(Mixer, branch.mixer) for branch in residual.branches]
        return found

    def explain(self, image: Tensor, block: str) -> dict[str, Tensor]:
        """What the mixer of a block shows about itself on these images: attention, kernels, a matrix."""
        return dict(self.explain_each(image, [block]))[block]

    @torch.no_grad()
    def explain_each(self, image: Tensor, blocks: Iterable[str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """`explain` for several blocks in one pass, in the order of the data flow."""
        wanted = set(blocks)
        for name in wanted - set(self.explanations):
            raise ConfigError(f"Nothing to explain at {name!r}. {near_misses(name, self.explanations)}")
        with evaluating(self):
            self.check_image(image)
            tokens, grid = self.stem(image)
            outputs = []
            for index, stage in enumerate(self.stages):
                tokens, grid = stage.enter(tokens, grid)
                for position, block in enumerate(stage.blocks):
                    if (name := f"stages.{index}.blocks.{position}") in wanted:
                        yield name, block.explain(tokens, grid)
                        wanted.remove(name)
                        if not wanted:
                            return
                    tokens = block(tokens, grid)
                outputs.append((tokens, grid))
            if self.coscale is not None:
                yield from self.coscale.explain_each(outputs, wanted)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode, and back in its own afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def inside(place: str, visit: Visit) -> Visit:
    """A visitor for names relative to a place."""
    return lambda name, tokens, grid: visit(place + name, tokens, grid)
