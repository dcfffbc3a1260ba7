"""Which pixels a class score rests on: Grad-CAM and integrated gradients, by captum."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixlab.core.errors import ConfigError, ImageError, require
from mixlab.evals.inspect.gradients import captum, recurrence_as_in_training
from mixlab.evals.subjects import Subject, backbone_of, timm_features
from mixlab.models.backbone import Backbone, evaluating
from mixlab.models.model import Model

Source = Subject | nn.Module
Targets = int | Sequence[int] | Tensor | None
STEPS = 50  # of the path between baseline and image


def grad_cam(source: Source, images: Tensor, targets: Targets = None) -> Tensor:
    """Where the evidence for a class lies, (B, H, W) in [0, 1] at the size of the normalized images (B, C, H, W).

    `targets` are class numbers, one for all images or one each; by default what the model says. Each map is divided by
    its own largest value, so maps tell nothing about strength; one without evidence for its class is all zero. The
    layer is the one that a Mixlab model declares, and the last map of a timm model that its score depends on.
    """
    model = model_of(source)
    with at_work(model), torch.inference_mode(False), torch.enable_grad():
        pixels = images.detach().clone().requires_grad_()
        chosen = chosen_classes(model, pixels, targets)
        with tapped(place_of(model, pixels, chosen)) as layer:
            evidence = captum("attr").LayerGradCam(model, layer).attribute(pixels, chosen, relu_attributions=True)
    return at_most_one(F.interpolate(evidence.detach(), images.shape[2:], mode="bilinear", align_corners=False)[:, 0])


def integrated_gradients(
    source: Source, images: Tensor, targets: Targets = None, *, baseline: Tensor | None = None, steps: int = STEPS
) -> Tensor:
    """How much every value of the normalized images adds to a class score, (B, C, H, W).

    The sum over an image is the score minus that of the baseline, as closely as `steps` on the path between them allow.
    The baseline is a black image unless given (as normalized values that broadcast to the images).
    """
    require(steps >= 1, f"1 step or more; got {steps}.")
    model = model_of(source)
    start = black(source, images) if baseline is None else baseline.to(images).expand_as(images)
    with at_work(model), torch.inference_mode(False), torch.enable_grad():
        pixels = images.detach().clone()
        found: Tensor = (
            captum("attr")
            .IntegratedGradients(model)
            .attribute(
                pixels,
                start.detach().clone(),
                target=chosen_classes(model, pixels, targets),
                n_steps=steps,
                internal_batch_size=max(len(images), 16),
            )
        )
    return found.detach().to(images.dtype)


def black(source: Source, images: Tensor) -> Tensor:
    """Black as the model sees it."""
    settings: Any = source.preprocessing if isinstance(source, Subject) else None
    if settings is None:
        if not isinstance(source, Model):
            raise ConfigError("Without a subject nobody knows what black is to this model: give a baseline.")
        settings = source.config.preprocessing
    level = -torch.tensor(settings.mean, dtype=torch.float64) / torch.tensor(settings.std, dtype=torch.float64)
    level = level if len(level) == images.shape[1] else level.mean().expand(images.shape[1])
    return level.to(images)[None, :, None, None].expand_as(images)


def chosen_classes(model: nn.Module, images: Tensor, targets: Targets) -> Tensor:
    """The class of every image, (B,): the given ones, or the model's own answers."""
    with torch.no_grad():
        scores = model(images)
    classes = scores.shape[1]
    if isinstance(model, Model) and not model.config.num_classes:
        raise ConfigError(f"{model.config.name!r} has no classifier, so no class score to explain.")
    if targets is None:
        return scores.argmax(1)
    chosen = torch.as_tensor(targets, device=images.device).long()
    chosen = chosen.expand(len(images)) if chosen.ndim == 0 else chosen
    if chosen.shape != (len(images),):
        raise ConfigError(f"One class for all {len(images)} images or one for each; got {tuple(chosen.shape)}.")
    if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < classes:
        raise ConfigError(f"Classes are numbers from 0 to {classes - 1}; got {sorted(set(chosen.tolist()))}.")
    return chosen


def at_most_one(maps: Tensor) -> Tensor:
    """Each map (B, H, W) divided by its largest value; zeros stay zeros."""
    maps = maps.clamp(min=0)
    most = maps.amax((1, 2), keepdim=True)
    return torch.where(most > 0, maps / most.clamp(min=torch.finfo(maps.dtype).tiny), 0.0)


# -- the layer -----------------------------------------------------------------------------------


class SaliencyLayer(NamedTuple):
    """A module, what makes an NCHW map of its output, and what puts such a map back into the output."""

    layer: nn.Module
    to_map: Callable[[Tensor], Tensor]
    put_back: Callable[[Tensor, Tensor], Tensor]


def place_of(model: nn.Module, images: Tensor, classes: Tensor) -> SaliencyLayer:
    if isinstance(model, Backbone):
        layer, to_map = model.class_activation
        height, width = images.shape[2], images.shape[3]
        return SaliencyLayer(layer, lambda output: to_map(output, (height, width)), into_tokens)
    return timm_place(model, images, classes)


def into_tokens(image_map: Tensor, output: Tensor) -> Tensor:
    """Class tokens in front of the tokens of a map."""
    tokens = image_map.permute(0, 2, 3, 1).flatten(1, 2)
    prefix = output.shape[1] - tokens.shape[1]
    return torch.cat([output[:, :prefix], tokens], 1) if prefix else tokens


@contextmanager
def tapped(place: SaliencyLayer) -> Iterator[nn.Module]:
    """A module that the map of a place goes through, for captum to listen to.

    Other threads that use the model meanwhile do not notice.
    """
    tap, thread = nn.Identity(), threading.get_ident()

    def through(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        if threading.get_ident() != thread:
            return None
        return place.put_back(tap(place.to_map(output)), output)

    handle = place.layer.register_forward_hook(through)
    try:
        yield tap
    finally:
        handle.remove()


def timm_place(model: nn.Module, images: Tensor, classes: Tensor) -> SaliencyLayer:
    """The last stage whose map the score depends on: behind the last mixing a class token alone may be read.

    Where it depends on none (a fresh classifier of zeros), the last stage.
    """
    places, last = timm_features(model), None
    with torch.no_grad():
        maps = model.forward_intermediates(images[:1], intermediates_only=True, output_fmt="NCHW")  # type: ignore[operator]
    for info, image_map in zip(reversed(places), reversed(maps), strict=False):
        layer = model.get_submodule(info["module"])
        seen: list[Tensor] = []
        handle = layer.register_forward_hook(lambda module, inputs, output, seen=seen: seen.append(output))
        try:
            score = model(images[:1])[0, classes[0]]
        finally:
            handle.remove()
        place = shape_of(layer, seen[-1], image_map)
        (gradient,) = torch.autograd.grad(score, seen[-1], allow_unused=True)
        last = place if last is None else last
        if place is not None and gradient is not None and bool(place.to_map(gradient).abs().sum() > 0):
            return place
    if last is None:
        raise ImageError(f"timm's {type(model).__name__} has no stage that gives its map as one tensor.")
    return last


def shape_of(layer: nn.Module, output: Any, image_map: Tensor) -> SaliencyLayer | None:
    """How a stage's output holds its map: as NCHW, as NHWC or as tokens. None where it does not."""
    height, width = image_map.shape[2:]
    if not isinstance(output, Tensor):
        return None
    shapes = [
        SaliencyLayer(layer, lambda out: out, lambda image, out: image),
        SaliencyLayer(layer, lambda out: out.permute(0, 3, 1, 2), lambda image, out: image.permute(0, 2, 3, 1)),
        SaliencyLayer(
            layer,
            lambda out: out[:, out.shape[1] - height * width :].unflatten(1, (height, width)).permute(0, 3, 1, 2),
            into_tokens,
        ),
    ]
    fitting = shapes[:2] if output.ndim == 4 else shapes[2:]
    for place in fitting:
        if output.ndim == 3 and output.shape[1] < height * width:
            continue
        found = place.to_map(output.detach())
        if found.shape == image_map.shape and torch.allclose(found, image_map, atol=1e-5, rtol=1e-4):
            return place
    return None


# -- around a call -------------------------------------------------------------------------------


def model_of(source: Source) -> nn.Module:
    """The model itself; an ensemble has no single layer and no single answer."""
    model = source.model if isinstance(source, Subject) else source
    return backbone_of(source, "saliency maps") if isinstance(model, Model) else model


@contextmanager
def at_work(model: nn.Module) -> Iterator[None]:
    """In eval mode, and back afterwards; nothing to do for a model that is in it."""
    training = any(module.training for module in model.modules())
    with evaluating(model) if training else nullcontext(), recurrence_as_in_training(model):
        yield
