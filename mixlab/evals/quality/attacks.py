"""FGSM and PGD on raw pixels: the normalization is part of the function that is attacked, and images stay images.

Sequencer's Appendix C.1 takes RVT's setting: a perturbation of at most 1 of 255 levels; for PGD 5 steps of half
a level. Steps go along the sign of the gradient of the cross-entropy; there is no random start.
"""

import warnings
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixlab.core.errors import ConfigError, near_misses, require
from mixlab.evals.inspect.gradients import captum, differentiable
from mixlab.evals.subjects import Subject

Kind = Literal["fgsm", "pgd"]
KINDS: tuple[Kind, ...] = ("fgsm", "pgd")
LEVELS = 255


class PixelModel(nn.Module):
    """Scores of images whose pixels lie between 0 and 1: what a subject's preprocessing does comes first."""

    mean: Tensor
    std: Tensor

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.model = subject.model
        for name in ("mean", "std"):
            values = torch.tensor(getattr(subject.preprocessing, name), dtype=torch.float32)[:, None, None]
            self.register_buffer(name, values, persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model((pixels - self.mean) / self.std).float()


@dataclass(frozen=True, kw_only=True)
class Attack:
    """Epsilon and step size are in levels of 255, as the papers count them; a step is half of epsilon by default."""

    kind: Kind
    epsilon: float = 1.0
    steps: int = 5
    step_size: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"Unknown attack {self.kind!r}. {near_misses(self.kind, KINDS)}")
        require(0 <= self.epsilon <= LEVELS, f"an epsilon from 0 to {LEVELS} levels; got {self.epsilon}.")
        require(self.steps >= 1 and self.step >= 0, f"1 step or more, of a size of 0 or more; got {self}.")

    @property
    def step(self) -> float:
        return self.epsilon / 2 if self.step_size is None else self.step_size

    def __call__(self, model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
        """Perturbed copies of pixels (B, C, H, W). The model has to be in eval mode."""
        training = [name for name, module in model.named_modules() if module.training]
        require(not training, f"a model in eval mode; {training[:3]} would drop or count what they see.")
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            differentiable(model),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", "Input Tensor .* did not already require gradients")  # captum asks
            if self.kind == "fgsm":
                return self.fgsm(model, pixels, labels)
            return self.pgd(model, pixels, labels)

    def fgsm(self, model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
        attack = captum("robust").FGSM(model, loss, lower_bound=0.0, upper_bound=1.0)
        attack.zero_thresh = 0.0  # small gradients have a sign too
        return attack.perturb(pixels.clone(), epsilon=self.epsilon / LEVELS, target=labels).detach()

    def pgd(self, model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
        attack = captum("robust").PGD(model, loss, lower_bound=0.0, upper_bound=1.0)
        attack.fgsm.zero_thresh = 0.0
        settings = {"radius": self.epsilon / LEVELS, "step_size": self.step / LEVELS, "step_num": self.steps}
        return attack.perturb(pixels.clone(), target=labels, **settings).detach()


def loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each image, so that none depends on its neighbors in the batch.

    Written as a function of the margin: where the textbook's form rounds the gradient of a sure model to zero, and with
    it the attack, this one keeps its sign.
    """
    own = scores.gather(1, labels[:, None])
    others = scores.scatter(1, labels[:, None], float("-inf"))
    return F.softplus(others.logsumexp(1) - own[:, 0])
