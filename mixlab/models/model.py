"""What every classifier of Mixlab can be asked, be it one backbone or an ensemble of several."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NoReturn

from torch import Tensor, nn

from mixlab.core.grid import Grid
from mixlab.models.config import ModelConfig
from mixlab.models.mixers import Mixer

if TYPE_CHECKING:
    from mixlab.models.backbone import Backbone, Block
    from mixlab.models.coscale import CoscaleBlock


class Model(nn.Module):
    """The protocol of classifiers: scores, features and maps of images, and facts that other code relies on.

    `strides` and `channels` describe the maps of `pyramid`; `reference_grids` are the stages' grids at the config's
    own image size.
    """

    config: ModelConfig
    class_names: tuple[str, ...]
    strides: tuple[int, ...]
    channels: tuple[int, ...]
    reference_grids: tuple[Grid, ...]

    @property
    def backbones(self) -> "list[Backbone]":
        """The backbones that compute: the model itself, or the members of an ensemble."""
        self.lacks("backbones")

    # -- what it computes ------------------------------------------------------------------------

    def embed(self, image: Tensor) -> Tensor:
        """Pooled, final-normed features (B, C): what the head sees."""
        self.lacks("embed")

    def pyramid(self, image: Tensor) -> list[Tensor]:
        """NCHW maps at the strides and channels that the model states."""
        self.lacks("pyramid")

    def intermediates(self, image: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
        """The NCHW maps after named places (see `intermediate_names`), in the order asked for."""
        self.lacks("intermediates")

    def explain(self, image: Tensor, block: str) -> dict[str, Tensor]:
        """What the mixer of a block shows about itself on these images: attention, kernels, a matrix."""
        self.lacks("explain")

    def explain_each(self, image: Tensor, blocks: Iterable[str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """`explain` for several blocks in one pass."""
        self.lacks("explain_each")

    # -- changes of it ---------------------------------------------------------------------------

    def set_activation_checkpointing(self, on: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        self.lacks("set_activation_checkpointing")

    def reset_classifier(self, num_classes: int) -> None:
        """Replace the last linear layer by a fresh one; with 0 classes the model gives `embed`."""
        self.lacks("reset_classifier")

    # -- facts -----------------------------------------------------------------------------------

    def check_image(self, image: Tensor) -> None:
        """Raise for anything that is not a batch of images this model takes."""
        self.lacks("check_image")

    def grids(self, height: int, width: int) -> tuple[Grid, ...]:
        """The grid of each stage for images of this size."""
        self.lacks("grids")

    @property
    def blocks(self) -> "dict[str, Block | CoscaleBlock]":
        """Every block by name, in the order of the data flow."""
        self.lacks("blocks")

    @property
    def intermediate_names(self) -> tuple[str, ...]:
        """Places with an output, in the order of the data flow."""
        self.lacks("intermediate_names")

    @property
    def layer_order(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Layers from the image to the head, each with the names of its parameters; every parameter is in one."""
        self.lacks("layer_order")

    @property
    def explanations(self) -> dict[str, tuple[str, ...]]:
        """What each block can show about itself; ask for it with `explain`."""
        self.lacks("explanations")

    @property
    def token_mixers(self) -> dict[str, list[Mixer]]:
        """The mixers of every place that mixes tokens, one per branch."""
        self.lacks("token_mixers")

    @property
    def no_decay(self) -> frozenset[str]:
        """Parameters that weight decay must not touch: vectors, and what a module declares as `undecayed`."""
        spared = {
            f"{path}.{name}" for path, module in self.named_modules() for name in getattr(module, "undecayed", ())
        }
        return frozenset(name for name, p in self.named_parameters() if p.ndim <= 1 or name in spared)

    @property
    def decayed_when_released(self) -> frozenset[str]:
        """Parameters that `no_decay` spares and weight decay touched in the training of the released weights."""
        places = [
            f"{path}.{name}"
            for path, module in self.named_modules()
            for name in getattr(module, "undecayed_here_only", ())
        ]
        trained = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
        return frozenset(name for name in trained if any(f"{name}.".startswith(f"{place}.") for place in places))

    def lacks(self, what: str) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} does not say what its {what} is.")
