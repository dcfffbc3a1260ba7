"""From a trained model to something that runs elsewhere."""

from mixlab.engine.compile import compile_blocks

__all__ = ["compile_blocks"]
