"""How a file in this folder says which mixer it lowers, and to what."""

from collections.abc import Callable
from typing import Any, TypeVar

from mixlab.engine.draft import CannotLower, Draft, Tokens
from mixlab.engine.steps import Pending, Place, Sum

Lowering = Callable[[Draft, Any, Place | Pending, Tokens, Sum | None], Place]
L = TypeVar("L", bound=Lowering)
LOWERINGS: dict[type, tuple[Lowering, Any]] = {}


def lowers(kind: type) -> Callable[[L], L]:
    """Announce a function that writes the steps of one class of mixers: `lower(draft, mixer, x, tokens, onto)`.

    `x` is what the mixer reads, `tokens` the images, grid and channels of it. The result is where its output lies, or
    with `onto` the residual sum. A mixer that cannot be lowered is told by `draft.require`.
    """

    def register(lowering: L) -> L:
        LOWERINGS[kind] = (lowering, kind.forward)  # type: ignore[attr-defined]
        return lowering

    return register


def lower(draft: Draft, mixer: Any, x: Place | Pending, tokens: Tokens, onto: Sum | None) -> Place:
    """Write the steps of a mixer, or raise with the reason why there are none."""
    kind = type(mixer)
    if kind not in LOWERINGS:
        raise CannotLower(f"there is no lowering for {kind.__name__}")
    lowering, forward = LOWERINGS[kind]
    draft.require(kind.forward is forward, f"{kind.__name__} has been given another forward")
    draft.watch_all(mixer)
    return lowering(draft, mixer, x, tokens, onto)
