"""How fresh weights are drawn. A module that sets `initialises_itself` is left as it made itself."""

from collections.abc import Callable

from torch import nn

from mixlab.errors import ConfigError, near_misses


def truncated_normal(module: nn.Module) -> None:
    """Linear layers and convolutions truncated normal with std 0.02, biases 0 (MetaFormer, HyenaPixel)."""
    if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


SCHEMES: dict[str, Callable[[nn.Module], None]] = {"truncated_normal": truncated_normal}


def initialise(module: nn.Module, scheme: str) -> None:
    """Apply a scheme to a module and all below it."""
    if scheme not in SCHEMES:
        raise ConfigError(f"Unknown init {scheme!r}. {near_misses(scheme, SCHEMES)}")
    if getattr(module, "initialises_itself", False):
        return
    SCHEMES[scheme](module)
    for child in module.children():
        initialise(child, scheme)
