"""The contract itself: it covers every mixer, at every width of the kernels, and a wrong fast path fails it."""

import importlib
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tests.models.mixers
from mixlab.core.choices import NoOptions
from mixlab.core.grid import Grid
from mixlab.engine.draft import Draft, Tokens
from mixlab.engine.kernels import VARIABLE, has_wide_vectors, kernels
from mixlab.engine.lowering.base import LOWERINGS
from mixlab.engine.steps import Pending, Place, Sum
from mixlab.models.layers import ACTIVATIONS, NORMS, SCALINGS
from mixlab.models.mixers import MIXERS, Mixer
from mixlab.models.mixers.base import StageParts
from mixlab.models.mixers.pool import Pool
from tests.models.mixers.agreement import (
    BLOCK_SIZES,
    BlockOf,
    check_inference,
    check_training,
    has_plans,
    images_for,
    tiny_model,
    tokens_for,
)
from tests.models.mixers.contract import MixerContract

OWN = "mixer_of_a_test"
WIDTHS = (0, 4, 8)  # numbers per vector; this process has the most that its processor and MIXLAB_NATIVE allow
PLANNED = {
    *("attention", "convattention", "hyena", "hyena_bidirectional", "hyena_pixel"),
    *("mlstm", "pool", "sepconv"),
}


class Shift(Mixer):
    """Half of the channels comes from the left neighbor, the other half stays."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.out = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        moved, kept = grid.to_map(tokens).chunk(2, 1)  # (B, C / 2, H, W) each
        return grid.behind_zeros(self.out(grid.from_map(torch.cat([moved.roll(1, 3), kept], 1))))


class WrongPlan(Pool):
    """Average pooling whose lowering has a larger window than its forward."""


def lower_wrongly(draft: Draft, mixer: WrongPlan, x: Place | Pending, tokens: Tokens, onto: Sum | None) -> Place:
    draft.require(not tokens.grid.prefix, "class tokens are not for this test")
    return draft.pool(mixer.size + 2, tokens.size, tokens.channels, draft.there(x), onto)


class Doubled(torch.autograd.Function):
    """The identity, with a gradient that is twice too large."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor) -> Tensor:
        return tokens.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class WrongGradient(Shift):
    """A shift with a gradient of its own in single precision, which is wrong."""

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        fast = tokens.dtype is torch.float32 and torch.is_grad_enabled()
        return super().forward(Doubled.apply(tokens) if fast else tokens, grid)


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], Mixer]], None]:
    """Registers what makes a mixer of so many channels, for the time of one test."""

    def add(make: Callable[[int], Mixer]) -> None:
        def build_stage(options: NoOptions, dim: int, depth: int, reference_grid: Grid) -> StageParts:
            return StageParts.of(make(dim) for _ in range(depth))

        monkeypatch.setitem(MIXERS._entries, OWN, (NoOptions, build_stage))

    return add


class TestOwnMixer(MixerContract):
    name = OWN

    @pytest.fixture(autouse=True)
    def registered(self, register: Callable[[Callable[[int], Mixer]], None]) -> None:
        register(Shift)


def test_every_mixer_has_a_contract() -> None:
    for module in pkgutil.iter_modules(tests.models.mixers.__path__):
        importlib.import_module(f"tests.models.mixers.{module.name}")
    assert set(MIXERS.names()) == {kind.name for kind in MixerContract.__subclasses__()} - {OWN}


@pytest.mark.parametrize(
    ("part", "name"),
    [("activation", name) for name in ACTIVATIONS.names()]
    + [("norm", name) for name in NORMS.names()]
    + [("branch_scale", name) for name in SCALINGS.names()],
)
def test_a_model_with_any_part_of_a_block_agrees_with_double_precision(part: str, name: str) -> None:
    for mixer in ("sepconv", "mlstm"):
        changes: dict[str, Any] = {part: name}
        model = tiny_model(mixer, {}, **changes)
        check_inference(model, images_for(3, 64, 40))
        check_training(model, images_for(3, 64, 40))


@pytest.mark.skipif(not has_wide_vectors(), reason="plans are for kernels with vectors of 8 or more")
def test_the_contract_runs_the_plans_that_there_are() -> None:
    planned = set()
    for name in MIXERS.names():
        model = tiny_model(name, {}).eval()
        with torch.inference_mode():
            model(images_for(1, 33, 47))
        if has_plans(model):
            planned.add(name)
    assert planned >= PLANNED


@pytest.mark.skipif(not has_wide_vectors(), reason="plans are for kernels with vectors of 8 or more")
def test_a_wrong_plan_fails_the_contract(
    register: Callable[[Callable[[int], Mixer]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOWERINGS, WrongPlan, (lower_wrongly, WrongPlan.forward))
    register(lambda dim: WrongPlan(3))
    images, grid = BLOCK_SIZES[0]
    with pytest.raises(AssertionError, match="inference, engine on, first call: off by"):
        check_inference(BlockOf(tiny_model(OWN, {}), grid), tokens_for(images, grid, 32))
    with pytest.raises(AssertionError, match="inference, engine on, first call: off by"):
        check_inference(tiny_model(OWN, {}), images_for(1, 33, 47))


def test_a_wrong_gradient_fails_the_contract(register: Callable[[Callable[[int], Mixer]], None]) -> None:
    register(WrongGradient)
    images, grid = BLOCK_SIZES[0]
    block = BlockOf(tiny_model(OWN, {}), grid)
    check_inference(block, tokens_for(images, grid, 32))
    with pytest.raises(AssertionError, match="training, engine on, gradient of input: off by"):
        check_training(block, tokens_for(images, grid, 32))


@pytest.mark.parametrize("width", [pytest.param(width, marks=[pytest.mark.heavy] if width else []) for width in WIDTHS])
def test_other_widths_keep_the_contract(width: int) -> None:
    """The width is read once per process, so a child runs every case with another one."""
    best = kernels()
    if best is None or width >= best.lanes:
        pytest.skip(f"this process has no vectors of more than {width} numbers")
    command = [sys.executable, "-m", "pytest", "-x", "-k", "double_precision", "-m", "not heavy", "tests/models/mixers"]
    usual = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    child = subprocess.run(
        [*command, "-p", "no:cacheprovider"], env={**usual, VARIABLE: str(width)}, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stdout + child.stderr
