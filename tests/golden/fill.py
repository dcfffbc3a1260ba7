"""Deterministic weights and images, so that a golden output needs no stored weights.

A golden record holds, for one published model: the checkpoint's keys with their
shapes (and which keys alias one tensor), the image size, and the logits that the
authors' own code gave when every tensor was filled by `fill` below.
Fill the same keys, load them through the library's checkpoint reader, run `image`,
and the logits must agree.
"""

import math
import zlib
from typing import Any

import numpy as np


def fill(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """A float32 tensor that depends on nothing but the checkpoint key and the shape."""
    if key.endswith("distance_map"):  # never trained: distance of each kernel tap from the kernel's centre
        axis = np.arange(shape[-1]) + 0.5 - shape[-1] / 2
        return np.hypot(axis[:, None], axis[None, :]).astype(np.float32)[None, None]
    if key.endswith("pos_emb.t"):  # never trained: distance along the filter, 0 at its centre
        ramp = np.linspace(0, 1, shape[1] // 2 + 1, dtype=np.float32)
        return 1 - np.concatenate([ramp[:-1], ramp[::-1]])[None, :, None]
    if key.endswith("modulation.deltas"):  # never trained
        return np.linspace(math.log(1e-2) / 1.5, math.log(1e-2) / 0.3, shape[-1], dtype=np.float32)[None, None]
    rng = np.random.RandomState(zlib.crc32(key.encode()) & 0x7FFFFFFF)
    noise = rng.standard_normal(shape).astype(np.float32)
    if key.endswith("deltas"):
        return 0.1 * noise
    if key.endswith("freq"):
        return 1.0 + 0.1 * noise
    if len(shape) >= 2 and shape[0] == 1:  # position tables, class tokens, per-channel vectors
        return 0.5 * noise
    if len(shape) >= 2 and math.prod(shape[1:]) > 1:
        return noise / math.sqrt(math.prod(shape[1:]))
    if key.endswith("bias"):
        return 0.1 * noise
    return 1.0 + 0.1 * noise


def image(height: int, width: int, batch: int = 1) -> np.ndarray:
    """A float32 NCHW batch, already normalised."""
    rng = np.random.RandomState(height * 10007 + width)
    return rng.standard_normal((batch, 3, height, width)).astype(np.float32)


def state_dict(record: dict[str, Any]) -> dict[str, np.ndarray]:
    """The checkpoint of a golden record: {key: array}; aliased keys share their values."""
    aliases = record.get("aliases", {})
    return {key: fill(aliases.get(key, key), tuple(shape)) for key, shape in record["keys"].items()}
