"""The 19 corruptions of ImageNet-C by name and severity, the same for an image whoever makes them and in which order.

Parameters and AlexNet's errors are facts of `configs/corruptions.json`; the arithmetic is in `ops/corruptions.py` and
`ops/weather.py`.
"""

import functools
import json
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
from PIL import Image

from mixlab.core.errors import ConfigError, ImageError, near_misses
from mixlab.data.seeding import seed_of
from mixlab.ops import corruptions as faults
from mixlab.ops import weather
from mixlab.ops.corruptions import WHITE, Array

SEVERITIES = (1, 2, 3, 4, 5)
EXTRA = "extra"  # the group that is not part of the mCE
MIN_SIDE = 32

OPERATIONS: dict[str, Callable[..., Array]] = {
    "gaussian_noise": faults.gaussian_noise,
    "shot_noise": faults.shot_noise,
    "impulse_noise": faults.impulse_noise,
    "defocus_blur": faults.defocus_blur,
    "glass_blur": faults.glass_blur,
    "motion_blur": faults.motion_blur,
    "zoom_blur": faults.zoom_blur,
    "snow": weather.snow,
    "frost": weather.frost,
    "fog": weather.fog,
    "brightness": faults.brightness,
    "contrast": faults.contrast,
    "elastic_transform": faults.elastic_transform,
    "pixelate": faults.pixelate,
    "jpeg_compression": faults.jpeg_compression,
    "speckle_noise": faults.speckle_noise,
    "gaussian_blur": faults.gaussian_blur,
    "spatter": weather.spatter,
    "saturate": faults.saturate,
}


@functools.cache
def facts() -> dict[str, Any]:
    """What the paper and its code publish."""
    found: dict[str, Any] = json.loads(files("mixlab").joinpath("configs", "corruptions.json").read_text("utf-8"))
    return found


def group_of(name: str) -> str:
    return str(facts()["corruptions"][name]["group"])


def short_name(name: str) -> str:
    """As the columns of Sequencer's Table 9 call it."""
    return str(facts()["corruptions"][name]["short"])


def standard() -> tuple[str, ...]:
    """The 15 that make up the mCE, in the order of the papers' tables."""
    return tuple(name for name in OPERATIONS if group_of(name) != EXTRA)


def alexnet_errors() -> dict[str, float]:
    """Mean error of AlexNet over the five severities of each standard corruption, from 0 to 1."""
    return dict(facts()["alexnet"]["errors"])


def severity_sets() -> dict[str, int]:
    """The published tables of parameters, and the side of the images that each was made for."""
    return {name: entry["size"] for name, entry in facts()["severities"].items()}


def choose(words: Iterable[str]) -> tuple[str, ...]:
    """Names of corruptions from "standard", "all", "none", groups and names."""
    groups = {group_of(name) for name in OPERATIONS}
    chosen: set[str] = set()
    for word in words:
        if word == "all":
            chosen |= OPERATIONS.keys()
        elif word == "standard":
            chosen |= set(standard())
        elif word in groups:
            chosen |= {name for name in OPERATIONS if group_of(name) == word}
        elif word in OPERATIONS:
            chosen.add(word)
        elif word != "none":
            known = [*OPERATIONS, *groups, "all", "standard", "none"]
            raise ConfigError(f"Unknown corruption {word!r}. {near_misses(word, known)}")
    return tuple(name for name in OPERATIONS if name in chosen)


def check_severities(severities: Iterable[int]) -> tuple[int, ...]:
    found = tuple(sorted(set(severities)))
    if not found or set(found) - set(SEVERITIES):
        raise ConfigError(f"Severities are from 1 to 5; got {', '.join(map(str, found)) or 'none'}.")
    return found


def parameters(name: str, severity: int, severity_set: str = "imagenet") -> Mapping[str, Any]:
    """The published parameters of one severity, by name."""
    if name not in OPERATIONS:
        raise ConfigError(f"Unknown corruption {name!r}. {near_misses(name, OPERATIONS)}")
    check_severities([severity])
    if severity_set not in severity_sets():
        raise ConfigError(f"Unknown set of severities {severity_set!r}. {near_misses(severity_set, severity_sets())}")
    row = facts()["severities"][severity_set]["rows"][name][severity - 1]
    return dict(zip(facts()["corruptions"][name]["parameters"], row, strict=True))


def corrupt(
    image: Array, name: str, severity: int, *, seed: int = 0, index: int = 0, severity_set: str = "imagenet"
) -> Array:
    """A corrupted copy of a uint8 image, (H, W) gray or (H, W, 3).

    What is drawn depends on nothing but the other arguments; `index` is the number of the image in its dataset.
    """
    return apply(image, name, severity, image_seed(seed, index), severity_set)


def image_seed(seed: int, index: int) -> int:
    """What a transform draws first for an image that a `Loader` reads in evaluation."""
    return random.Random(seed_of(seed, 0, index, 0)).getrandbits(63)


def apply(image: Array, name: str, severity: int, own_seed: int, severity_set: str) -> Array:
    settings = parameters(name, severity, severity_set)
    fits = image.dtype == np.uint8 and (image.ndim == 2 or (image.ndim == 3 and image.shape[2] == 3))
    if not fits or min(image.shape[:2]) < MIN_SIDE:
        raise ImageError(
            f"Corruptions take uint8 images of (H, W) or (H, W, 3) with sides of {MIN_SIDE} or more; "
            f"got {image.dtype} of {image.shape}."
        )
    generator = np.random.default_rng(seed_of(own_seed, int.from_bytes(name.encode()), severity))
    pixels = (image[..., None] if image.ndim == 2 else image) / WHITE  # (H, W, C)
    found = OPERATIONS[name](pixels, generator, **settings)
    # values are cut off, not rounded, as published; what is a whole level stays it
    levels = (found.clip(0, 1) * WHITE + 1e-6).astype(np.uint8)
    return levels.reshape(image.shape)


@dataclass(frozen=True)
class Corrupt:
    """A step of a transform. It takes its seed from Python's generator, which a `Loader` sets for each image."""

    name: str
    severity: int
    severity_set: str = "imagenet"

    def __call__(self, image: Image.Image) -> Image.Image:
        own_seed = random.getrandbits(63)
        return Image.fromarray(apply(np.asarray(image), self.name, self.severity, own_seed, self.severity_set))
