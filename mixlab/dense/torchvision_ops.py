"""torchvision's detection parts where its compiled operators are missing: ours take their place.

Call `supply_operators` before torchvision's detectors run. Where the real operators load, it does nothing.
"""

import sys

import torch
from torch import Tensor

from mixlab.ops.boxes import nms, roi_align

_supplied: torch.library.Library | None = None  # lives as long as the process


def supply_operators() -> bool:
    """Let `nms` and `roi_align` of torchvision run on ours if its own are missing; True if that was done now.

    `mixlab.core.guards.mend_torchvision` has described `nms` to PyTorch, so it becomes a real operator. `roi_align`
    already has a fallback in Python, which is far too slow: that is what is replaced.
    """
    global _supplied
    from torchvision import extension
    from torchvision.ops import boxes

    if _supplied is not None or extension._has_ops():
        return False
    _supplied = torch.library.Library("torchvision", "IMPL")
    _supplied.impl("nms", nms, "CompositeExplicitAutograd")
    boxes._assert_has_ops = lambda: None
    pooling = sys.modules["torchvision.ops.roi_align"]  # the package's attribute of this name is the function
    pooling._roi_align = fallback  # type: ignore[attr-defined]
    pooling.is_compile_supported = lambda device: True  # type: ignore[attr-defined]  # ours needs no compiler
    return True


@torch.compiler.disable  # how many samples there are depends on the data
def fallback(
    maps: Tensor, regions: Tensor, scale: float, height: int, width: int, samples: int, aligned: bool
) -> Tensor:
    """`roi_align` with the arguments in torchvision's order."""
    return roi_align(maps, regions, (height, width), scale=scale, samples=samples, aligned=aligned)
