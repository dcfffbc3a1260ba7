"""A model at an image size that it was not built for. Mixlab's take any; some of timm's have to be rebuilt."""

import copy
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mixlab.core.errors import ImageError
from mixlab.evals.subjects import TIMM, Subject, build_timm
from mixlab.models.model import Model

AS_IT_IS, RESAMPLED = "as it is", "resampled"


@torch.no_grad()
def resized(subject: Subject, size: tuple[int, int]) -> tuple[Subject, str]:
    """The model for images of this size, and whether its weights are "as it is" or had to be "resampled".

    Raises an ImageError that says why if neither is possible. The subject itself is left alone.
    """
    at_size = replace(subject, image_size=size)
    if isinstance(subject.model, Model):
        at_size.model(blank(at_size))  # a mixer may have a limit: its error says so
        return at_size, AS_IT_IS
    reasons = []
    ways = [(AS_IT_IS, unchanged), (RESAMPLED, set_size), (RESAMPLED, rebuilt)]
    if not hasattr(subject.model, "set_input_size"):
        ways.remove((RESAMPLED, set_size))
    for how, make in ways:
        try:
            found = replace(at_size, model=make(subject, size))
            found.model(blank(found))
        except Exception as error:  # models of timm refuse a size with whatever their code runs into
            reasons.append(first_line(error))
        else:
            return found, how
    raise ImageError(f"{subject.name!r} cannot take {size[0]} x {size[1]} px: {'; '.join(dict.fromkeys(reasons))}.")


def blank(subject: Subject) -> Tensor:
    weight = next(subject.model.parameters())
    return torch.zeros(1, subject.in_channels, *subject.image_size, device=weight.device, dtype=weight.dtype)


def unchanged(subject: Subject, size: tuple[int, int]) -> nn.Module:
    return subject.model


def set_size(subject: Subject, size: tuple[int, int]) -> nn.Module:
    """By timm's own method, which not every model has: position tables are resampled, windows grow with the grid."""
    model = copy.deepcopy(subject.model)
    model.set_input_size(img_size=size)  # type: ignore[operator]
    return model.eval()


def rebuilt(subject: Subject, size: tuple[int, int]) -> nn.Module:
    """A new model of this size, with the weights as timm fits those of a file to it."""
    name = subject.name.removeprefix(TIMM).partition("=")[0]
    weight = next(subject.model.parameters())
    options = {"num_classes": subject.num_classes, "in_chans": subject.in_channels}
    with torch.random.fork_rng(devices=[]):
        model = build_timm(name, {"img_size": size}, **options).to(weight.device, weight.dtype)
    fit: Callable[..., dict[str, Any]] | None
    fit = getattr(sys.modules[type(subject.model).__module__], "checkpoint_filter_fn", None)
    state = {key: value.clone() for key, value in subject.model.state_dict().items()}
    model.load_state_dict(state if fit is None else fit(state, model))
    return model.eval()


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    told = lines[1].strip() if lines[0].startswith("Error(s) in loading") and len(lines) > 1 else lines[0]
    return told.rstrip(".")
