"""A backbone with the methods that timm asks of its models."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mixlab.core.errors import ConfigError, near_misses
from mixlab.core.grid import Grid
from mixlab.core.hooks import serve
from mixlab.models.backbone import Backbone, Stage
from mixlab.models.build import check_class_tokens
from mixlab.models.config import ModelConfig
from mixlab.models.coscale import CoscaleGroup, Output
from mixlab.models.heads import POOLS, Readout, pool
from mixlab.models.stems import Stem

POOL_OF = {"avg": "mean", "token": "class_token", "bilateral": "bilateral", "center": "center", "centre": "center"}
FORMATS = ("NCHW", "NHWC", "NLC")


class Enough(Exception):
    """Raised to stop a forward pass once every feature that was asked for is there."""


class TimmBackbone(Backbone):
    """A backbone that also speaks timm: the same parameters under the same names, and timm's methods.

    `forward_features` gives the last map (B, C, H, W), or tokens (B, class tokens + H*W, C) where the model reads its
    class tokens; CoaT's class token is then the aggregate of its scales. `global_pool=""` leaves that unpooled.
    """

    pretrained_cfg: dict[str, Any]  # timm sets both
    default_cfg: dict[str, Any]

    def __init__(
        self, config: ModelConfig, stem: Stem, stages: Sequence[Stage], coscale: CoscaleGroup | None, readout: Readout
    ) -> None:
        super().__init__(config, stem, stages, coscale, readout)
        self.global_pool = next(name for name, ours in POOL_OF.items() if ours == config.pool.name)
        self.drop_rate = 0.0
        self.stage_count = len(stages)  # before anything is pruned
        self.check_pool(config)

    def check_pool(self, config: ModelConfig) -> None:
        if config.coscale is not None and (config.pool.name != "class_token" or config.final_norm != "before_pool"):
            raise ConfigError(
                f"{config.name!r} puts several scales together by their class tokens; with pool {config.pool.name!r} "
                f"and final_norm {config.final_norm!r} there is no single last map for timm. Use mixlab.create_model."
            )

    # -- facts -----------------------------------------------------------------------------------

    @property
    def num_classes(self) -> int:
        return self.config.num_classes

    @property
    def in_chans(self) -> int:
        return self.config.in_channels

    @property
    def num_features(self) -> int:
        """Return the channels of `forward_features`."""
        return self.config.dims[-1]

    @property
    def head_hidden_size(self) -> int:
        """Return the width of the pooled features."""
        return self.readout.width

    @property
    def output_fmt(self) -> str:
        return "NLC" if self.readout.pool.reads_class_tokens else "NCHW"

    @property
    def feature_places(self) -> tuple[str, ...]:
        """Return the intermediates that are timm's features: one per stage, or one per block of a single stage."""
        if self.stage_count == 1:
            return tuple(f"stages.0.blocks.{index}" for index in range(len(self.stages[0].blocks)))
        names = [f"stages.{index}" for index in range(len(self.stages))]
        if self.coscale is not None:
            first = len(names) - self.coscale.scales
            last = len(self.coscale.blocks) - 1
            names[first:] = [f"coscale.blocks.{last}.{scale}" for scale in range(first, len(names))]
        return tuple(names)

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        infos = []
        for index, name in enumerate(self.feature_places):
            stage = 0 if self.stage_count == 1 else index
            module = name.rpartition(".")[0] if name.startswith("coscale") else name
            infos.append({"num_chs": self.channels[stage], "reduction": self.strides[stage], "module": module})
        return infos

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int]:
        """Return the function that numbers the layer of a parameter or module from the image to the head; `coarse`
        counts whole stages.
        """
        layer: dict[str, int] = {}
        for index, (name, parameters) in enumerate(self.layer_order):
            stage = {"stem": 0, "head": len(self.stages) + 2}.get(name)
            if stage is None:
                stage = len(self.stages) + 1 if name.startswith("coscale") else int(name.split(".")[1]) + 1
            layer |= dict.fromkeys(parameters, stage if coarse else index)

        def find(name: str) -> int:
            inside = [number for parameter, number in layer.items() if parameter.startswith(f"{name}.")]
            return layer[name] if name in layer else max(inside, default=max(layer.values()))

        return find

    def no_weight_decay(self) -> set[str]:
        return set(self.no_decay)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.set_activation_checkpointing(enable)

    # -- the head --------------------------------------------------------------------------------

    def get_classifier(self) -> nn.Module:
        return self.head.classifier

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Change the number of classes and, if given, the pooling; with 0 classes the model gives pooled features."""
        unpooled = self.global_pool == "" if global_pool is None else global_pool == ""
        if num_classes and unpooled:
            raise ConfigError("global_pool='' gives unpooled features, which no classifier takes: use num_classes=0.")
        width = self.readout.width
        if global_pool is not None:
            self.set_pool(global_pool)
        if self.readout.width != width:
            super().reset_classifier(0)  # a head of the new width from scratch
        super().reset_classifier(num_classes)

    def set_pool(self, name: str) -> None:
        if name and POOL_OF.get(name) != self.config.pool.name:
            if name not in POOL_OF:
                raise ConfigError(f"Unknown global_pool {name!r}. {near_misses(name, [*POOL_OF, ''])}")
            config = replace(self.config, pool=POOLS.parse(POOL_OF[name]))
            self.check_pool(config)
            if config.pool.name == "class_token":
                check_class_tokens(config, list(self.stages))
            old, scales = self.readout, len(self.readout.norms)
            changed = pool(config.pool, config.class_tokens[-1])
            dim, first = config.dims[-1], old.norm_first
            self.readout = Readout(changed, dim, scales=scales, norm_first=first, eps=config.final_norm_eps)
            self.readout.to(old.norms[0].weight.device, old.norms[0].weight.dtype).train(old.training)
            if self.readout.norms[0].weight.shape == old.norms[0].weight.shape:
                self.readout.load_state_dict(old.state_dict())
            self.config = config
        self.global_pool = name

    # -- the data flow ---------------------------------------------------------------------------

    def forward(self, image: Tensor) -> Tensor:
        usual = type(self) is TimmBackbone and self.global_pool and "forward_features" not in vars(self)
        scores: Tensor | None = serve(self, "forward", image) if usual and "forward_head" not in vars(self) else None
        return self.forward_head(self.forward_features(image)) if scores is None else scores

    def forward_features(self, image: Tensor) -> Tensor:
        """Return the last map or tokens, unpooled."""
        return self.last(self.features(image))

    def last(self, outputs: list[Output]) -> Tensor:
        readout = self.readout
        scales = list(zip(readout.norms, outputs[-len(readout.norms) :], strict=True))
        norm, (tokens, grid) = scales[-1]
        if readout.norm_first:
            tokens = norm(tokens)
        if readout.aggregate is not None:
            prefixes = [norm(tokens[:, : grid.prefix]) for norm, (tokens, grid) in scales]
            prefix = readout.aggregate(torch.stack(prefixes, 1).flatten(2)).view_as(prefixes[0])
            tokens = torch.cat([prefix, grid.image(tokens)], 1)
        return tokens if readout.pool.reads_class_tokens else grid.to_map(tokens)

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        """Return class scores from `forward_features`; with `pre_logits` what the classifier would take."""
        if self.global_pool:
            readout = self.readout
            if readout.pool.reads_class_tokens:
                prefix = self.config.class_tokens[-1]
                features = readout.pool(features, Grid(1, features.shape[1] - prefix, prefix))
            else:
                grid = Grid(features.shape[2], features.shape[3])
                features = readout.pool(grid.from_map(features), grid)
            features = features if readout.norm_first else readout.norms[0](features)
            features = nn.functional.dropout(features, self.drop_rate, self.training)
        return features if pre_logits else self.head(features)

    def forward_intermediates(
        self,
        image: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Return features of `feature_info` in the given order, after the result of `forward_features`.

        `norm` puts the final norm behind those that it fits, where it stands in front of the pooling. With `stop_early`
        nothing behind the last one is computed: it then takes the place of the result.
        """
        if str(getattr(output_fmt, "value", output_fmt)) not in FORMATS:
            raise ConfigError(f"Unknown output_fmt {output_fmt!r}. {near_misses(str(output_fmt), FORMATS)}")
        names = self.feature_places
        taken = chosen(len(names), indices)
        last = max(taken)
        outputs_by_name: dict[str, Output] = {}

        def keep(name: str, tokens: Tensor, grid: Grid) -> None:
            if name in names and names.index(name) in taken:
                outputs_by_name[name] = (tokens, grid)
            if stop_early and name == names[last] and last + 1 < len(names):
                raise Enough

        try:
            outputs = self.features(image, keep)
        except Enough:
            outputs = []
        shown = [self.shown(index, *outputs_by_name[names[index]], norm, output_fmt) for index in taken]
        if intermediates_only:
            return shown
        return (self.last(outputs) if outputs else shown[taken.index(last)]), shown

    def shown(self, index: int, tokens: Tensor, grid: Grid, norm: bool, output_fmt: str) -> Tensor:
        """Return one feature, normed if requested and possible, in the requested format."""
        norms = self.readout.norms
        of_scale = 0 if self.stage_count == 1 else index - self.stage_count + len(norms)
        if norm and self.readout.norm_first and of_scale >= 0:
            tokens = norms[of_scale](tokens)
        if output_fmt == "NLC":
            return grid.image(tokens)
        image = grid.to_map(tokens)
        return image if output_fmt == "NCHW" else image.permute(0, 2, 3, 1)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what comes after the last of these features; return their indices, counted from the front.

        The final norm stays, because it says the model's precision, but is frozen where no feature passes it.
        """
        taken = chosen(len(self.feature_places), indices)
        last = max(taken)
        if self.stage_count == 1:
            del self.stages[0].blocks[last + 1 :]
        elif self.coscale is None or last < len(self.stages) - self.coscale.scales:
            self.coscale = None
            del self.stages[last + 1 :]
        if prune_norm:
            self.readout.requires_grad_(False)
        if prune_head:
            self.reset_classifier(0, "")
        return taken


def chosen(count: int, indices: int | Sequence[int] | None) -> list[int]:
    """Return indices counted from the front: all for None, the last n for a number, negative ones from the end."""
    wanted = count if indices is None else indices
    taken = [count - wanted + index for index in range(wanted)] if isinstance(wanted, int) else list(wanted)
    lowest = 0 if isinstance(wanted, int) else -count
    if not taken or not all(lowest <= index < count for index in taken):
        raise ConfigError(f"The model has {count} features; got the indices {indices!r}.")
    return [index % count for index in taken]
