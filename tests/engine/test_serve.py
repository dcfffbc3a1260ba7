"""Models as plans of kernels, beside the same as PyTorch computes it."""

import copy
import gc
import pickle
import re
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mixlab
from mixlab.core.grid import Grid
from mixlab.core.hooks import without_engine
from mixlab.engine.cache import CACHE
from mixlab.engine.kernels import has_wide_vectors
from mixlab.engine.plan import Segment
from mixlab.engine.serve import MOST, plan_for, serve_part
from mixlab.models.backbone import Block
from mixlab.models.layers import Branch, GlobalNorm, Mlp, Residual, Scaling, StarReLU
from mixlab.models.mixers.base import Shared
from mixlab.models.mixers.hyena import PlaneConv
from mixlab.models.mixers.mlstm import BACKWARDS, COLUMNS, ROWS
from mixlab.models.mixers.sepconv import SepConv

pytestmark = pytest.mark.skipif(not has_wide_vectors(), reason="steps are for kernels with vectors of 8 or more")

MODELS: dict[str, dict[str, Any]] = {
    "vil_pico": {},
    "convformer_pico": {},
    "caformer_pico": {},
    "coat_lite_pico": {},
    "hpx_former_pico": {},
    "hb_former_pico": {},
    "deit_tiny": {"depths": [2]},
    "poolformerv2_s12": {"depths": [1, 1, 1, 1]},
}


def build(name: str, **options: Any) -> mixlab.Backbone:
    torch.manual_seed(0)
    model = mixlab.create_model(name, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # also of what begins as 0 or 1
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def residuals(model: nn.Module) -> list[Residual]:
    return [module for module in model.modules() if isinstance(module, Residual)]


def as_written(model: nn.Module, *inputs: Any) -> Tensor:
    with without_engine(), torch.inference_mode():
        output: Tensor = model(*inputs)
    return output


def assert_close(output: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(output, wanted, rtol=0, atol=1e-5 * float(wanted.std() + wanted.abs().max()))


def assert_same(model: nn.Module, x: Tensor) -> None:
    wanted = as_written(model, x)
    with torch.inference_mode():
        for _ in range(2):  # a plan that is made and a plan that is kept
            assert_close(model(x), wanted)


def left_to_pytorch(model: mixlab.Backbone, x: Tensor) -> dict[str, str]:
    """Residual sums that are no kernels, and why."""
    report = model.engine_report(x)
    assert not report.reason
    return {
        part.path: part.reason
        for part in report.parts
        if part.reason and re.search(r"blocks\.\d+\.(token|channel)$", part.path)
    }


BLOCKS: weakref.WeakKeyDictionary[Residual, Block] = weakref.WeakKeyDictionary()


def block_of(residual: Residual) -> Block:
    """A block of nothing else, which the engine serves by itself."""
    if residual not in BLOCKS:
        BLOCKS[residual] = Block(None, residual, None)
        BLOCKS[residual].training = residual.training
    return BLOCKS[residual]


def run(residual: Residual, tokens: Tensor, grid: Grid) -> Tensor:
    served = serve_part(block_of(residual), tokens, grid)
    return residual(tokens, grid) if served is None else served


def check(residual: Residual, tokens: Tensor, grid: Grid) -> None:
    wanted = as_written(residual, tokens, grid)
    with torch.inference_mode():
        for _ in range(2):
            assert_close(run(residual, tokens, grid), wanted)


def is_served(residual: Residual) -> bool:
    """Whether there is a plan for it with kernels."""
    plans = [entry.value.plan for entry in CACHE.entries(block_of(residual)).values()]
    return any(isinstance(item, Segment) for plan in plans if plan is not None for item in plan.items)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [(1, 64, 96), (3, 96, 64)])
def test_models_give_the_same(name: str, size: tuple[int, int, int]) -> None:
    model, (batch, height, width) = build(name, **MODELS[name]), size
    if name == "deit_tiny":
        height = width = 224
    x = torch.randn(batch, 3, height, width)
    assert_same(model, x)
    assert not left_to_pytorch(model, x)


def block(mixer: nn.Module, dim: int, *, scaling: Scaling | None = None, bias: bool = True) -> Residual:
    residual = Residual([Branch(nn.LayerNorm(dim, bias=bias), mixer)], scaling or Scaling(dim), drop_rate=0, skip=False)
    with torch.no_grad():
        for parameter in residual.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return residual.eval()


def sepconv(dim: int = 24, *, bias: bool = True, kernel: int = 7) -> SepConv:
    return SepConv(dim, 2 * dim + 3, kernel, StarReLU(0.9, -0.4, True, True), bias=bias)


def mlp(dim: int = 24, *, bias: bool = True) -> Mlp:
    return Mlp(dim, 3 * dim + 1, StarReLU(0.9, -0.4, True, True), bias=bias)


@pytest.mark.parametrize("scales", [(None, None), (0.7, None), (None, 0.3), (1.3, -0.6)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("grid", [Grid(4, 5), Grid(23, 25)])  # few rows and many
@pytest.mark.parametrize("make", [sepconv, mlp])
def test_sums_with_and_without_factors(make: Any, grid: Grid, bias: bool, scales: tuple[float | None, ...]) -> None:
    torch.manual_seed(1)
    residual = block(make(bias=bias), 24, scaling=Scaling(24, *scales), bias=bias)
    check(residual, torch.randn(2, grid.tokens, 24), grid)
    assert is_served(residual)


class Halved(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return 0.5 * tokens.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("make", [sepconv, mlp])
def test_other_norms_are_called_in_front(make: Any) -> None:
    torch.manual_seed(4)
    tokens, grid = torch.randn(2, 20, 20), Grid(4, 5)
    for norm in (nn.LayerNorm(20), nn.Identity(), GlobalNorm(20, True, 1e-5), Halved()):
        residual = block(make(20), 20)  # channels that vectors do not divide
        residual.branches[0].norm = norm
        check(residual, tokens, grid)
        assert is_served(residual)


def changes() -> dict[str, Any]:
    def in_place(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data.mul_(1.1)

    def other_memory(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.9

    def elsewhere_and_in_place(model: nn.Module) -> None:
        left = [parameter.data for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # the same values, the old ones stay
        with torch.inference_mode():
            model(torch.randn(1, 3, 64, 64))
        in_place(model)
        assert left

    def other_parameters(model: nn.Module) -> None:
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.detach() * 1.2))

    def loaded(model: nn.Module) -> None:
        model.load_state_dict({name: 0.8 * value for name, value in model.state_dict().items()})

    def assigned(model: nn.Module) -> None:
        model.load_state_dict({name: 1.3 * value for name, value in model.state_dict().items()}, assign=True)

    def other_strides(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.data = module.weight.data.t().contiguous().t()

    def eps(model: nn.Module) -> None:
        for module in model.modules():
            if hasattr(module, "eps"):
                module.eps = 0.1  # type: ignore[assignment]

    return {
        f.__name__: f
        for f in (
            in_place,
            other_memory,
            elsewhere_and_in_place,
            other_parameters,
            loaded,
            assigned,
            other_strides,
            eps,
        )
    }


@pytest.mark.parametrize("change", changes())
@pytest.mark.parametrize("name", ["vil_pico", "convformer_pico", "hpx_former_pico"])
def test_changed_weights_are_seen(name: str, change: str) -> None:
    model, x = build(name), torch.randn(1, 3, 64, 64)
    with torch.inference_mode():
        before = model(x)
    changes()[change](model)
    assert_same(model, x)
    with torch.inference_mode():
        assert change == "other_strides" or not torch.allclose(model(x), before, rtol=1e-4)


@pytest.mark.parametrize(
    "name", ["vil_pico", "convformer_pico", "caformer_pico", "hpx_former_pico", "poolformerv2_s12"]
)
def test_whoever_listens_is_told(name: str) -> None:
    model, x = build(name, **MODELS[name]), torch.randn(1, 3, 64, 64)
    with torch.inference_mode():
        model(x)
        inside = [module for residual in residuals(model) for module in residual.modules() if module is not residual]
        called: set[int] = set()
        for module in inside:
            if type(module).__name__ not in ("ModuleList", "ParameterList", "BlockDiagonal"):
                module.register_forward_hook(lambda module, *_: called.add(id(module)))
        model(x)
    wanted = {id(module) for module in inside if module._forward_hooks}
    gates = {id(m) for m in inside if isinstance(m, nn.Linear) and m.out_features == 4}  # joined with the projections
    assert wanted - gates == called - gates


def test_whoever_listens_to_a_shared_encoding_is_told() -> None:
    model, x, called = build("coat_lite_pico"), torch.randn(1, 3, 64, 64), []
    with torch.inference_mode():
        before = model(x)
        convs = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.groups > 1 and m.kernel_size == (5, 5)]
        handle = convs[0].register_forward_hook(lambda *_: called.append(1))
        torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)
        assert called
        handle.remove()
        convs[0].register_forward_hook(lambda *inputs: inputs[2] + 1)
        assert not torch.allclose(model(x), before, rtol=1e-3)


@pytest.mark.parametrize(("name", "attribute"), [("coat_lite_pico", "scaled"), ("poolformerv2_s12", "size")])
def test_changed_settings_are_seen(name: str, attribute: str) -> None:
    model, x = build(name, **MODELS[name]), torch.randn(1, 3, 64, 64)
    with torch.inference_mode():
        before = model(x)
    for module in model.modules():
        if hasattr(module, attribute):
            setattr(module, attribute, False if attribute == "scaled" else 5)
    assert_same(model, x)
    with torch.inference_mode():
        assert not torch.allclose(model(x), before, rtol=1e-4)


def test_another_shared_encoding_is_seen() -> None:
    model, x = build("coat_lite_pico"), torch.randn(1, 3, 64, 64)
    with torch.inference_mode():
        before = model(x)
    for module in model.modules():
        relative = getattr(module, "relative", None)
        if isinstance(relative, Shared):
            relative.module = copy.deepcopy(relative.module)
            for parameter in relative.module.parameters():
                parameter.data.add_(0.3)
    assert_same(model, x)
    with torch.inference_mode():
        assert not torch.allclose(model(x), before, rtol=1e-4)


def test_other_forwards_are_called() -> None:
    class Twice(SepConv):
        def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
            return 2 * super().forward(tokens, grid)

    torch.manual_seed(2)
    mixer = Twice(24, 48, 7, StarReLU(1.0, 0.0, True, True), bias=True)
    residual, tokens, grid = block(mixer, 24), torch.randn(1, 20, 24), Grid(4, 5)
    with torch.inference_mode():
        twice = run(residual, tokens, grid) - tokens
        mixer.__class__ = SepConv  # type: ignore[assignment]
        torch.testing.assert_close(twice, 2 * (run(residual, tokens, grid) - tokens), rtol=1e-4, atol=1e-5)
        mixer.narrow.forward = lambda x: 0 * x[..., :24]  # type: ignore[assignment, method-assign]
        torch.testing.assert_close(run(residual, tokens, grid), tokens)


def test_what_steps_are_not_for_goes_layer_by_layer() -> None:
    torch.manual_seed(3)
    grid, tokens = Grid(4, 5), torch.randn(1, 20, 24)
    cases = [
        block(sepconv(kernel=3), 24),  # the library's convolution is as fast
        block(sepconv(), 24).double(),
        block(sepconv(), 24).train(),
    ]
    for residual in cases:
        weight = next(residual.parameters())
        x = tokens[..., : len(weight)].to(weight.dtype)
        with torch.inference_mode():
            run(residual, x, grid)
        assert not is_served(residual)
    residual = block(sepconv(), 24)
    with torch.inference_mode():
        run(residual, tokens[:, :3].contiguous(), Grid(1, 3))  # few rows
        run(residual, tokens.transpose(1, 2).contiguous().transpose(1, 2), grid)
        with torch.autocast("cpu", torch.bfloat16):
            run(residual, tokens, grid)
    run(residual, tokens.requires_grad_(), grid).sum().backward()
    assert not is_served(residual)
    assert tokens.grad is not None


@pytest.mark.parametrize(
    ("options", "whole"),
    [
        ({"directions": "uni"}, 6),
        ({"directions": "quad"}, 6),
        ({"directions": "oct"}, 6),
        ({"conv": "none"}, 0),
        ({"conv": "causal_1d", "kernel": 4}, 6),
        ({"conv": "1d"}, 6),
        ({"form": "parallel"}, 0),
        ({"chunk": 5}, 6),
        ({"bias": False}, 6),
        ({"class_tokens": "start"}, 6),
    ],
)
def test_ways_of_vision_lstm(options: dict[str, Any], whole: int) -> None:
    model = build("vil_pico", mixers={"name": "mlstm", **options})
    assert_same(model, torch.randn(2, 3, 64, 96))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mixlab.engine.plan.MOST", 0)  # every room by itself
        assert_same(model, torch.randn(2, 3, 64, 96))
    assert len(residuals(model)) - len(left_to_pytorch(model, torch.randn(2, 3, 64, 96))) == whole


def test_copies_and_files_start_without_steps() -> None:
    residual, tokens = block(mlp(), 24), torch.randn(1, 20, 24)
    with torch.inference_mode():
        wanted = run(residual, tokens, Grid(4, 5))
        assert is_served(residual)
        for other in (copy.deepcopy(residual), pickle.loads(pickle.dumps(residual))):
            assert not is_served(other)
            torch.testing.assert_close(run(other, tokens, Grid(4, 5)), wanted, rtol=0, atol=0)


def test_only_the_last_sizes_are_kept() -> None:
    residual = block(mlp(), 24)
    with torch.inference_mode():
        for side in range(4, 4 + 2 * MOST):
            run(residual, torch.randn(1, side * side, 24), Grid(side, side))
    assert sides(residual) == list(range(4 + MOST, 4 + 2 * MOST))
    with torch.inference_mode():
        run(residual, torch.randn(1, (4 + MOST) ** 2, 24), Grid(4 + MOST, 4 + MOST))
    assert sides(residual) == [*range(5 + MOST, 4 + 2 * MOST), 4 + MOST]


def sides(residual: Residual) -> list[int]:
    return [key[2].height for key in CACHE.entries(block_of(residual))]  # type: ignore[index]


class Wrapped(nn.Module):
    """Hands everything on but its own forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *inputs: Any) -> Tensor:
        output: Tensor = 3 * self.module(*inputs)
        return output


def test_wrappers_and_other_residuals_are_called() -> None:
    class Thrice(Residual):
        def update(self, tokens: Tensor, grid: Grid) -> Tensor:
            return 3 * super().update(tokens, grid)

    torch.manual_seed(5)
    residual, tokens, grid = block(mlp(), 24), torch.randn(1, 20, 24), Grid(4, 5)
    branch = residual.branches[0]
    with torch.inference_mode():
        wanted = tokens + 3 * (run(residual, tokens, grid) - tokens)
        branch.mixer = Wrapped(branch.mixer)  # type: ignore[arg-type]
        torch.testing.assert_close(run(residual, tokens, grid), wanted)
        branch.mixer = branch.mixer.module
        residual.branches[0] = Wrapped(branch)
        torch.testing.assert_close(run(residual, tokens, grid), wanted)
        residual.branches[0] = branch
        residual.__class__ = Thrice
        torch.testing.assert_close(run(residual, tokens, grid), wanted)


@pytest.mark.parametrize(
    ("mixer", "whole"),
    [
        ({"name": "hyena"}, 2),
        ({"name": "hyena", "norm": True, "short": 5}, 2),
        ({"name": "hyena_bidirectional"}, 2),
        ({"name": "hyena_bidirectional", "norm": True, "short": 1}, 2),
        ({"name": "hyena_pixel"}, 2),
        ({"name": "hyena_pixel", "norm": False, "kernel": (3, 5)}, 2),
        ({"name": "hyena_pixel", "larger": "resample", "features": "1d"}, 2),
        ({"name": "hyena_pixel", "filter": "separable"}, 0),
        ({"name": "hyena_pixel", "form": "fft"}, 0),
        ({"name": "hyena_pixel", "reuse": False}, 0),
    ],
)
def test_ways_of_hyena(mixer: dict[str, Any], whole: int) -> None:
    frame: dict[str, Any] = {"dims": [32, 48], "depths": [1, 1], "branch_scale": ["none", "res_scale"]}
    model = build("hpx_former_pico", mixers=mixer, channel_mlp=False, **frame)
    for size in ((64, 96), (96, 48)):
        assert_same(model, torch.randn(2, 3, *size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mixlab.engine.plan.MOST", 0)  # every room by itself
        assert_same(model, torch.randn(2, 3, 64, 96))
    assert len(residuals(model)) - len(left_to_pytorch(model, torch.randn(2, 3, 96, 48))) == whole


@pytest.mark.parametrize("dims", [[24, 40], [21, 37]])
@pytest.mark.parametrize("mixer", ["hyena_pixel", "hyena_bidirectional", "sepconv", "pool", "attention"])
def test_channels_that_do_not_fill_vectors(mixer: str, dims: list[int]) -> None:
    model = build("convformer_pico", dims=dims, depths=[1, 1], mixers=mixer, branch_scale=["none", "res_scale"])
    x = torch.randn(1, 3, 64, 64)
    assert_same(model, x)
    assert not left_to_pytorch(model, x)


def test_a_spectrum_too_large_is_made_from_kept_taps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mixlab.engine.lowering.hyena.SPECTRUM_NUMBERS", 0)
    model = build(
        "hpx_former_pico", dims=[32], depths=[1], branch_scale="none", channel_mlp=False, mixers="hyena_pixel"
    )
    x = torch.randn(1, 3, 64, 64)
    assert_same(model, x)
    assert not left_to_pytorch(model, x)


def test_a_convolution_of_another_kind_is_called() -> None:
    class Doubled(PlaneConv):
        def forward(self, *arguments: Any) -> Tensor:
            return 2 * super().forward(*arguments)

    model = build(
        "hpx_former_pico", dims=[32], depths=[1], branch_scale="none", channel_mlp=False, mixers="hyena_pixel"
    )
    for module in model.modules():
        if isinstance(module, PlaneConv):
            module.__class__ = Doubled
    assert_same(model, torch.randn(1, 3, 64, 64))


def test_a_kernel_too_large_to_be_kept_is_made_for_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mixlab.engine.lowering.hyena.KEPT_NUMBERS", 1)
    model = build(
        "hpx_former_pico", dims=[32], depths=[1], branch_scale="none", channel_mlp=False, mixers="hyena_pixel"
    )
    x = torch.randn(1, 3, 64, 64)
    assert_same(model, x)
    assert list(left_to_pytorch(model, x).values()) == ["the filter is too large to be kept"]


def test_what_does_not_belong_together_is_left_to_pytorch() -> None:
    torch.manual_seed(6)
    tokens = torch.randn(1, 25, 24)
    with torch.inference_mode():
        for grid in (Grid(5, 6), Grid(4, 5)):
            with pytest.raises(RuntimeError):
                block(sepconv(), 24)(tokens, grid)
        other = block(mlp(), 24)
        other.branches[0].norm = nn.Identity()
        with pytest.raises(RuntimeError):
            run(other, torch.randn(1, 20, 16), Grid(4, 5))
        other.branches[0].mixer.fc2 = nn.Linear(40, 24)  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError):
            run(other, torch.randn(1, 20, 24), Grid(4, 5))
    single = block(mlp(), 24, scaling=Scaling(24, None, 0.5))
    single.scaling.branch = nn.Parameter(torch.tensor([0.5]))
    check(single, tokens, Grid(5, 5))


def test_another_way_is_seen() -> None:
    model, x = build("vil_pico"), torch.randn(1, 3, 64, 96)
    for path in (BACKWARDS, COLUMNS, ROWS):
        with torch.inference_mode():
            model(x)
        residuals(model)[0].branches[0].mixer.path = path  # type: ignore[attr-defined]
        assert_same(model, x)


def other_norm(residual: Residual) -> None:
    residual.branches[0].norm = nn.LayerNorm(24, eps=1.0)


def other_scaling(residual: Residual) -> None:
    residual.scaling = Scaling(24, 0.5, None)


def other_branch(residual: Residual) -> None:
    residual.branches[0] = Branch(nn.LayerNorm(24), mlp())


def other_layer(residual: Residual) -> None:
    residual.branches[0].mixer.fc2 = nn.Linear(73, 24)  # type: ignore[attr-defined]


def other_activation(residual: Residual) -> None:
    residual.branches[0].mixer.act = StarReLU(0.3, 0.2, True, True)  # type: ignore[attr-defined]


def no_bias(residual: Residual) -> None:
    residual.branches[0].mixer.fc1.bias = None  # type: ignore[attr-defined]


PARTS = (other_norm, other_scaling, other_branch, other_layer, other_activation, no_bias)


@pytest.mark.parametrize("change", PARTS, ids=lambda change: change.__name__)
def test_other_parts_are_seen(change: Callable[[Residual], None]) -> None:
    torch.manual_seed(7)
    residual, tokens, grid = block(mlp(), 24), torch.randn(1, 20, 24), Grid(4, 5)
    with torch.inference_mode():
        before = run(residual, tokens, grid)
    change(residual)
    check(residual, tokens, grid)
    with torch.inference_mode():
        assert not torch.allclose(run(residual, tokens, grid), before, rtol=1e-3)


def test_another_shared_module_and_another_kind_are_seen() -> None:
    class Twice(Mlp):
        def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
            return 2 * super().forward(tokens, grid)

    torch.manual_seed(8)
    handed, tokens, grid = Shared(mlp()), torch.randn(1, 20, 24), Grid(4, 5)
    residual = Residual([Branch(nn.LayerNorm(24), handed)], Scaling(24), drop_rate=0, skip=False).eval()
    with torch.inference_mode():
        before = run(residual, tokens, grid)
        assert is_served(residual)
        handed.module = mlp()
        assert not torch.allclose(run(residual, tokens, grid), before, rtol=1e-3)
        once = run(residual, tokens, grid) - tokens
        handed.module.__class__ = Twice
        torch.testing.assert_close(run(residual, tokens, grid) - tokens, 2 * once, rtol=1e-4, atol=1e-5)


def test_attributes_that_change_places_are_seen() -> None:
    residual, tokens, grid = block(mlp(), 24, scaling=Scaling(24, None, 0.3)), torch.randn(1, 20, 24), Grid(4, 5)
    with torch.inference_mode():
        run(residual, tokens, grid)
    factor = residual.scaling.branch
    residual.scaling.residual = factor
    del residual.scaling.branch
    residual.scaling.branch = None
    check(residual, tokens, grid)


def test_a_default_device_is_not_for_the_kernels() -> None:
    residual, tokens, grid = block(mlp(), 24), torch.randn(1, 20, 24), Grid(4, 5)
    with torch.inference_mode():
        wanted = run(residual, tokens, grid)
        with torch.device("meta"):
            torch.testing.assert_close(run(residual, tokens, grid), wanted, rtol=0, atol=0)


def test_shallow_copies_have_plans_of_their_own() -> None:
    residual, tokens, grid = block(mlp(), 24), torch.randn(1, 20, 24), Grid(4, 5)
    with torch.inference_mode():
        run(residual, tokens, grid)
    for twin in (copy.copy(residual), residual._replicate_for_data_parallel()):
        twin._modules = dict(twin._modules)
        twin.scaling = Scaling(24, 0.5, None)
        check(twin, tokens, grid)
    check(residual, tokens, grid)


def test_a_norm_whose_output_does_not_suit_is_called_once() -> None:
    calls: list[int] = []

    class Counts(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            calls.append(1)
            return tokens.double()

    residual, tokens, grid = block(mlp(), 24), torch.randn(1, 20, 24), Grid(4, 5)
    residual.branches[0].norm = Counts()
    with torch.inference_mode(), pytest.raises(RuntimeError):  # weights of another dtype
        run(residual, tokens, grid)
    assert calls


def test_old_weights_are_not_kept_when_other_sizes_follow() -> None:
    residual = block(mlp(), 24)
    with torch.inference_mode():
        run(residual, torch.randn(1, 20, 24), Grid(4, 5))
        old = weakref.ref(residual.branches[0].mixer.fc1.weight)  # type: ignore[attr-defined]
        residual.load_state_dict({name: 2 * one for name, one in residual.state_dict().items()}, assign=True)
        run(residual, torch.randn(2, 20, 24), Grid(4, 5))
    gc.collect()
    assert old() is None


def test_a_model_that_nobody_has_any_more_is_gone_at_once() -> None:
    model = build("vil_pico")
    with torch.inference_mode():
        model(torch.randn(1, 3, 64, 64))
    assert CACHE.entries(model)
    left = [weakref.ref(residual) for residual in residuals(model)]
    gc.disable()
    try:
        del model
        assert not any(one() is not None for one in left)
    finally:
        gc.enable()


def test_threads_share_a_model() -> None:
    model = build("vil_pico")
    images = [torch.randn(1, 3, 64 + 16 * (index % 3), 64) for index in range(24)]

    def run(image: Tensor) -> Tensor:
        with torch.inference_mode():
            output: Tensor = model(image)
        return output

    wanted = [run(image) for image in images]
    with ThreadPoolExecutor(4) as crew:
        for output, one in zip(crew.map(run, images), wanted, strict=True):
            torch.testing.assert_close(output, one, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["vil_pico", "convformer_pico", "hpx_former_pico"])
def test_what_is_not_a_number_spreads(name: str) -> None:
    model, x = build(name), torch.randn(1, 3, 64, 64)
    x[0, 0, 0, 0] = float("nan")
    with torch.inference_mode():
        assert model(x).isnan().any()


class Named(mixlab.Backbone):
    """Another name for the same data flow."""


class Doubled(mixlab.Backbone):
    """Pooled features of its own."""

    def embed(self, image: Tensor) -> Tensor:
        return 2 * self.readout(self.features(image))


def test_a_subclass_is_served_as_far_as_it_leaves_the_data_flow_alone() -> None:
    image = torch.randn(1, 3, 32, 32)
    named, doubled = build("convformer_pico"), build("convformer_pico")
    named.__class__, doubled.__class__ = Named, Doubled
    assert plan_for(named, "forward", image).plan is not None
    assert plan_for(doubled, "forward", image).plan is None
    assert plan_for(doubled, "features", image).plan is not None
    with torch.inference_mode():
        assert torch.allclose(doubled.embed(image), 2 * named.embed(image), atol=1e-4)
        assert not torch.allclose(doubled(image), named(image), atol=1e-4)
