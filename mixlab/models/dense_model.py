"""What segmenters and detectors have in common: a backbone, what is built on it, and what training asks of both."""

from typing import Any, ClassVar, Protocol

from torch import nn

from mixlab.models.backbone import Backbone
from mixlab.models.model import Model

HEAD = "head"


class TaskConfig(Protocol):
    """What describes a model but its backbone: enough, with that, to build it again."""

    @property
    def num_classes(self) -> int: ...

    def plain(self) -> dict[str, Any]: ...


class DenseModel(nn.Module):
    """A task's model on a backbone. Given images it predicts; given images and targets it returns its losses by name.

    `backbone_path` is where the backbone is registered within the model, such as "maps.backbone.".
    """

    task: ClassVar[str]
    backbone_path: ClassVar[str]
    config: TaskConfig

    def __init__(self) -> None:
        super().__init__()
        self.class_names: tuple[str, ...] = ()

    @property
    def backbone(self) -> Backbone:
        found = self.get_submodule(self.backbone_path.rstrip("."))
        assert isinstance(found, Backbone)
        return found

    @property
    def layer_order(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The backbone's layers as it orders them, then everything that was built on it as one last layer."""
        prefix = self.backbone_path
        layers = [
            (f"{prefix}{name}", tuple(f"{prefix}{one}" for one in own)) for name, own in self.backbone.layer_order
        ]
        inner = {name for _, own in layers for name in own}
        rest = tuple(name for name, _ in self.named_parameters() if name not in inner)
        last, own = layers[-1]
        if last == f"{prefix}{HEAD}":  # the final norm belongs to what comes after the blocks
            return (*layers[:-1], (HEAD, own + rest))
        return (*layers, (HEAD, rest))

    @property
    def no_decay(self) -> frozenset[str]:
        """Of the backbone what it says itself; elsewhere norms and biases, which have one dimension."""
        prefix = self.backbone_path
        spared = {f"{prefix}{name}" for name in self.backbone.no_decay}
        return frozenset(spared | {n for n, p in self.named_parameters() if not n.startswith(prefix) and p.ndim <= 1})

    @property
    def decayed_when_released(self) -> frozenset[str]:
        return frozenset(f"{self.backbone_path}{name}" for name in self.backbone.decayed_when_released)


Trainable = Model | DenseModel  # what can be trained and saved
