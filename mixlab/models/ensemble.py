"""Several models as one: their predictions are averaged (HyenaPixel, section 4.1)."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from mixlab.core.errors import ConfigError, near_misses
from mixlab.core.grid import Grid
from mixlab.models.backbone import Backbone, Block
from mixlab.models.config import ModelConfig
from mixlab.models.coscale import CoscaleBlock
from mixlab.models.mixers import Mixer
from mixlab.models.model import Model
from mixlab.models.modules import Modules

Average = Literal["logits", "probabilities"]
AVERAGES: tuple[Average, ...] = ("logits", "probabilities")
SHARED_FIELDS = ("num_classes", "in_channels", "preprocessing")


class Ensemble(Model):
    """The mean of the members' class scores; with `average="probabilities"`, the logarithm of their mean probability.

    What belongs to one member has its name behind `members.<index>.`; embeddings and, where the strides agree, the maps
    of the pyramid stand side by side. Train or load the members one by one, or all together like any model.
    """

    def __init__(self, members: Sequence[Backbone], *, name: str = "ensemble", average: Average = "logits") -> None:
        super().__init__()
        check_members(members, average)
        self.members: Modules[Backbone] = Modules(members)
        self.title, self.average = name, average

    # -- one call for all members ----------------------------------------------------------------

    def forward(self, image: Tensor) -> Tensor:
        """Class scores (B, num_classes); without a head, the features."""
        if not self.members[0].config.num_classes:
            return self.embed(image)
        return average_scores([member(image) for member in self.members], self.average)

    def embed(self, image: Tensor) -> Tensor:
        """The members' features side by side."""
        return torch.cat([member.embed(image) for member in self.members], 1)

    def pyramid(self, image: Tensor) -> list[Tensor]:
        """The members' maps of each stride side by side."""
        self.strides  # noqa: B018  raises where they differ
        return [torch.cat(maps, 1) for maps in zip(*(member.pyramid(image) for member in self.members), strict=True)]

    def intermediates(self, image: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
        wanted = list(names)
        for name in wanted:
            if name not in self.intermediate_names:
                raise ConfigError(
                    f"{self.title!r} has no intermediate {name!r}. {near_misses(name, self.intermediate_names)}"
                )
        maps: dict[str, Tensor] = {}
        for prefix, member in self.named_members:
            asked = [name.removeprefix(prefix) for name in wanted if name.startswith(prefix)]
            if asked:
                maps |= {prefix + name: value for name, value in member.intermediates(image, asked).items()}
        return {name: maps[name] for name in wanted}

    def explain(self, image: Tensor, block: str) -> dict[str, Tensor]:
        if block not in self.explanations:
            raise ConfigError(f"Nothing to explain at {block!r}. {near_misses(block, self.explanations)}")
        _, index, name = block.split(".", 2)
        return self.members[int(index)].explain(image, name)

    def explain_each(self, image: Tensor, blocks: Iterable[str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
        for block in blocks:
            yield block, self.explain(image, block)

    def set_activation_checkpointing(self, on: bool = True) -> None:
        for member in self.members:
            member.set_activation_checkpointing(on)

    def reset_classifier(self, num_classes: int) -> None:
        for member in self.members:
            member.reset_classifier(num_classes)

    def check_image(self, image: Tensor) -> None:
        self.members[0].check_image(image)

    # -- facts -----------------------------------------------------------------------------------

    @property
    def backbones(self) -> list[Backbone]:
        """The members."""
        return list(self.members)

    @property
    def config(self) -> ModelConfig:  # type: ignore[override]
        """What the members have in common, and the first one's for the rest."""
        check_members(self.members, self.average)
        return replace(self.members[0].config, name=self.title, family="ensembles", reported=())

    @property
    def class_names(self) -> tuple[str, ...]:
        named = {member.class_names for member in self.members if member.class_names}
        if len(named) > 1:
            raise ConfigError(f"The members of {self.title!r} were trained on different classes: {sorted(named)}.")
        return next(iter(named), ())

    @class_names.setter
    def class_names(self, names: tuple[str, ...]) -> None:
        for member in self.members:
            member.class_names = tuple(names)

    @property
    def strides(self) -> tuple[int, ...]:  # type: ignore[override]
        strides = {member.strides for member in self.members}
        if len(strides) > 1:
            raise ConfigError(
                f"The members of {self.title!r} have maps at different strides, {sorted(strides)}. Put a "
                f"PyramidAdapter around each member."
            )
        return self.members[0].strides

    @property
    def channels(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(sum(widths) for widths in zip(*(member.channels for member in self.members), strict=True))

    @property
    def reference_grids(self) -> tuple[Grid, ...]:  # type: ignore[override]
        return self.grids(*self.config.image_size)

    def grids(self, height: int, width: int) -> tuple[Grid, ...]:
        self.strides  # noqa: B018  raises where they differ
        return self.members[0].grids(height, width)

    @property
    def blocks(self) -> dict[str, Block | CoscaleBlock]:
        return {prefix + name: block for prefix, member in self.named_members for name, block in member.blocks.items()}

    @property
    def intermediate_names(self) -> tuple[str, ...]:
        return tuple(prefix + name for prefix, member in self.named_members for name in member.intermediate_names)

    @property
    def layer_order(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Layers that are equally far from the head are one; every layer has the names of the deepest member."""
        orders = [[(prefix, *layer) for layer in reversed(member.layer_order)] for prefix, member in self.named_members]
        layers = []
        for level in itertools.zip_longest(*orders):
            there = [layer for layer in level if layer is not None]
            layers.append((there[0][1], tuple(prefix + name for prefix, _, names in there for name in names)))
        return tuple(reversed(layers))

    @property
    def no_decay(self) -> frozenset[str]:
        return frozenset(prefix + name for prefix, member in self.named_members for name in member.no_decay)

    @property
    def explanations(self) -> dict[str, tuple[str, ...]]:
        return {
            prefix + name: words for prefix, member in self.named_members for name, words in member.explanations.items()
        }

    @property
    def token_mixers(self) -> dict[str, list[Mixer]]:
        return {
            prefix + name: held for prefix, member in self.named_members for name, held in member.token_mixers.items()
        }

    @property
    def named_members(self) -> list[tuple[str, Backbone]]:
        return [(f"members.{index}.", member) for index, member in enumerate(self.members)]


def average_scores(scores: Sequence[Tensor], average: Average = "logits") -> Tensor:
    """Return the class scores of an ensemble, given those of its members, each (..., num_classes).

    The average of "probabilities" is returned as its logarithm, so that it is a score like any other.
    """
    if average == "probabilities":
        chances = torch.stack([member.log_softmax(-1) for member in scores])
        return chances.logsumexp(0) - torch.tensor(len(scores)).log()
    return torch.stack(list(scores)).mean(0)


def check_average(average: str) -> None:
    if average not in AVERAGES:
        raise ConfigError(f"An ensemble averages {' or '.join(map(repr, AVERAGES))}; got {average!r}.")


def check_members(members: Iterable[Model], average: Average) -> None:
    members = list(members)
    if any(isinstance(member, Ensemble) for member in members) or len({id(member) for member in members}) < len(
        members
    ):
        raise ConfigError("The members of an ensemble are different single models: take the members of an ensemble.")
    if not members or not all(isinstance(member, Backbone) for member in members):
        kinds = [type(member).__name__ for member in members]
        raise ConfigError(f"An ensemble needs one or more Mixlab models; got {kinds}.")
    check_average(average)
    for field in SHARED_FIELDS:
        values = [getattr(member.config, field) for member in members]
        if any(value != values[0] for value in values):
            raise ConfigError(f"The members of an ensemble need the same {field}; got {values}.")
