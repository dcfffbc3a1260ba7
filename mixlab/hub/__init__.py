"""Other libraries: the Hugging Face Hub, and timm's registry (`import mixlab.timm`)."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mixlab.hub.hugging_face import from_hub, push_to_hub

__all__ = ["from_hub", "push_to_hub"]
FILES = ("hugging_face", "model_card", "timm", "timm_backbone")


def __getattr__(name: str) -> Any:
    """Give what `mixlab.hub` held while it was one file, which timm's registry does not need."""
    if name.startswith("__") or name in FILES:
        raise AttributeError(f"module 'mixlab.hub' has no attribute {name!r}")
    return getattr(importlib.import_module("mixlab.hub.hugging_face"), name)
