"""What runs where in a model, and why not elsewhere."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mixlab.engine import serve
from mixlab.engine.plan import PlannedPart, Segment
from mixlab.engine.steps import FLOAT


@dataclass(frozen=True)
class EngineReport:
    """`parts` in the order of the data flow. `reason`: why nothing of the model is made of kernels, or empty. `calls`:
    how often a run calls the kernels; `memory_bytes`: of everything between input and output that is not a tensor.
    """

    parts: tuple[PlannedPart, ...]
    reason: str = ""
    calls: int = 0
    memory_bytes: int = 0

    def plain(self) -> dict[str, object]:
        """For JSON."""
        rows = [
            {
                "part": one.path,
                "runs_on": "PyTorch" if one.reason else "kernels",
                "reason": one.reason,
                "steps": list(one.steps),
            }
            for one in self.parts
        ]
        return {"parts": rows, "reason": self.reason, "calls": self.calls, "memory_bytes": self.memory_bytes}

    def __str__(self) -> str:
        if self.reason:
            return f"Everything runs as PyTorch: {self.reason}."
        width = max(len(part.path) for part in self.parts)
        rows = [
            f"{part.path:{width}}  "
            + (f"PyTorch: {part.reason}" if part.reason else f"kernels: {', '.join(part.steps)}")
            for part in self.parts
        ]
        last = f"{self.calls} calls of kernels, {self.memory_bytes / 1e6:.1f} MB between input and output"
        return "\n".join([*rows, last])


def report(model: nn.Module, image: Tensor) -> EngineReport:
    """What `model(image)` does under `torch.inference_mode()`."""
    with torch.inference_mode():
        reason = serve.reason_against(model, image)
        if reason is not None:
            return EngineReport((), reason)
        served = serve.plan_for(model, "forward", image)
    if served.plan is None:
        return EngineReport((), served.reason)
    calls = sum(isinstance(item, Segment) for item in served.plan.items)
    return EngineReport(served.plan.parts, "", calls, FLOAT * served.plan.memory.size)
