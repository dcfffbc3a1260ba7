"""Randomness as a pure function of numbers: a hash for seeds, and the global generators set for a moment."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_of(*parts: int) -> int:
    """63 bits that depend on every part, the same in every process and on every machine."""
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_generators(seed: int) -> None:
    """Python's, numpy's and torch's global CPU generators start from `seed`."""
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would reach for the accelerators too


@contextmanager
def seeded(seed: int | None = None) -> Iterator[None]:
    """The generators start from `seed` inside, if one is given, and go on as before outside."""
    generator = torch.default_generator
    before = random.getstate(), np.random.get_state(), generator.get_state()
    if seed is not None:
        seed_generators(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        generator.set_state(before[2])
