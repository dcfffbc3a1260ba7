"""Token mixers, one file each. A file placed here is found by itself."""

import importlib
import pkgutil

from mixlab.models.mixers.base import MIXERS, BlockParts, Mixer, MixerChoice, Shared, StageParts, heads_for

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["MIXERS", "BlockParts", "Mixer", "MixerChoice", "Shared", "StageParts", "heads_for"]
