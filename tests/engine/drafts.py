"""Steps that a test writes, run as a plan."""

from collections.abc import Callable

from torch import Tensor, nn

from mixlab.engine.draft import Draft
from mixlab.engine.plan import Plan
from mixlab.engine.steps import PackedWeight, Place


def drafted(
    write: Callable[..., Place],
    *inputs: Tensor,
    shape: tuple[int, ...] | None = None,
    packed: dict[int, PackedWeight] | None = None,
) -> Plan:
    """The plan of what `write(draft, *places)` writes for such inputs; its output is like the first of them."""
    draft = Draft(nn.Identity(), {}, packed)
    out = write(draft, *[draft.given(tuple(one.shape)) for one in inputs])
    return draft.close([draft.as_tensor(out, shape or tuple(inputs[0].shape))])[0]


def computed(write: Callable[..., Place], *inputs: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """The output of that plan."""
    return drafted(write, *inputs, shape=shape).run(*inputs)[0]
