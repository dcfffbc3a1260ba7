"""The engine's answers to what models ask through `mixlab.core.hooks`."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from mixlab.core import hooks
from mixlab.engine import backends, compiled, report, serve
from mixlab.engine.derived import derived
from mixlab.engine.lowering import register_all

T = TypeVar("T")


class EngineAnswers(hooks.Engine):
    """What models ask, answered by plans."""

    def serve(self, model: nn.Module, call: str, image: Tensor, visit: Any) -> Any:
        return serve.serve(model, call, image, visit)

    def derived(
        self, owner: nn.Module, key: Hashable, sources: Sequence[Tensor], make: Callable[[], T], *, cheap: bool
    ) -> T:
        return derived(owner, key, sources, make, cheap=cheap)

    def part(self, part: nn.Module, tokens: Tensor, grid: Any) -> Tensor | None:
        return compiled.as_operator(part, tokens, grid)

    def report(self, model: nn.Module, image: Tensor) -> Any:
        return report.report(model, image)


register_all()
ANSWERS = EngineAnswers()
assert backends, "they register themselves"
hooks.fill(ANSWERS)
