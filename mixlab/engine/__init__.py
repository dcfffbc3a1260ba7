"""The engine: models as plans of kernels. Importing it fills the hooks that models ask."""

from mixlab.engine.answers import ANSWERS
from mixlab.engine.lowering import register_all

register_all()
__all__ = ["ANSWERS"]
