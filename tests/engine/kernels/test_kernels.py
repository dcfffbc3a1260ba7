"""The kernels at every level of instructions that this processor has, beside the references."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils import parametrize

import mixlab
from mixlab.core.grid import Grid
from mixlab.engine import kernels as native
from mixlab.engine.draft import Draft
from mixlab.engine.kernels import kernels, may_run
from mixlab.engine.kernels.depthwise import convolve_and_multiply, convolve_channels, taps_gradient
from mixlab.engine.kernels.factor import factor_and_contexts, factor_gradient, run_factor
from mixlab.engine.kernels.linear import AFTER, run_linear, run_mlp, run_star, run_weight
from mixlab.engine.kernels.norm import Norm, norm_of_product
from mixlab.engine.kernels.recurrent import Run, lstm_maps
from mixlab.engine.kernels.resample import resample_tokens
from mixlab.engine.steps import PackedWeight, Place, Sum
from mixlab.evals.cost.speed import peak, reset_peak
from mixlab.models.layers import GELU, DepthwiseConv, Mlp
from mixlab.models.mixers.mlstm import BACKWARDS, ROWS, Convolution, Mlstm, MlstmOptions, Path, paths
from mixlab.ops import linear
from mixlab.ops.activations import FUNCTIONS
from mixlab.ops.blockdiagonal import BLOCK_HEADS, block_heads, heads_reference
from mixlab.ops.convattention import factorised_attention_reference
from mixlab.ops.exchange import move
from mixlab.ops.longconv import long_conv, long_conv_1d, long_conv_2d
from mixlab.ops.mlstm_layer import MLSTM_LAYER
from mixlab.ops.recurrent import recurrent_reference
from tests.engine.drafts import computed, drafted

LEVELS = [4, 8, 16]
needs_kernels = pytest.mark.skipif(kernels() is None, reason="installed without a compiler")


def test_they_are_built_where_there_is_a_compiler() -> None:
    wanted = sys.platform == "linux" and shutil.which("gcc") and os.environ.get(native.VARIABLE) != "0"
    assert kernels() is not None or not wanted


@pytest.fixture(params=LEVELS)
def lanes(request: pytest.FixtureRequest) -> Iterator[int]:
    yield from at_level(request.param)


def at_level(most: int) -> Iterator[int]:
    """With vectors of so many numbers, or the most that there are."""
    found = kernels()
    if found is None:
        pytest.skip("installed without a compiler")
    usual = found.lanes
    found.lanes = found.library.mixlab_choose(most)
    yield found.lanes
    found.lanes = found.library.mixlab_choose(usual)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def near(ours: Tensor, expected: Tensor, bound: float = 3e-6) -> None:
    """Within a bound of the largest number expected, which is in double precision."""
    assert ours.shape == expected.shape
    assert ours.dtype is torch.float32
    assert float((ours - expected).abs().max()) <= bound * float(expected.abs().max())


# -- linear layers -------------------------------------------------------------------------------


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize(
    "shape", [(1, 1, 20), (7, 33, 57), (100, 400, 20), (600, 1000, 35), (97, 16, 16), (481, 5, 90)]
)
def test_linear(lanes: int, after: str, shape: tuple[int, int, int]) -> None:
    rows, depth, columns = shape
    x, weight, bias = torch.randn(rows, depth), torch.randn(columns, depth) / depth**0.5, torch.randn(columns)
    follow = FUNCTIONS[after]  # type: ignore[index]
    near(run_linear(x, weight, bias, after), follow(F.linear(x.double(), weight.double(), bias.double())))
    turned = weight.t().contiguous().t()
    near(run_linear(x, turned, None, after), follow(F.linear(x.double(), weight.double())))


@needs_kernels
@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 40), depth=st.integers(1, 40), columns=st.integers(1, 40))
def test_linear_of_any_size(rows: int, depth: int, columns: int) -> None:
    x, weight = torch.randn(rows, depth), torch.randn(columns, depth)
    near(run_linear(x, weight, None), F.linear(x.double(), weight.double()))


@pytest.mark.parametrize("shape", [(1, 3, 5, 2), (500, 40, 130, 33), (1000, 64, 700, 64)])
def test_two_layers(lanes: int, shape: tuple[int, int, int, int]) -> None:
    rows, width, hidden, out = shape
    x, first, second = torch.randn(rows, width), torch.randn(hidden, width) / 8, torch.randn(out, hidden) / 8
    bias, offset = torch.randn(hidden), torch.randn(out)
    inner = F.gelu(F.linear(x.double(), first.double(), bias.double()))
    near(run_mlp(x, first, bias, second, offset, "gelu"), F.linear(inner, second.double(), offset.double()))
    inner = F.linear(x.double(), first.double()).relu().square()
    near(run_mlp(x, first, None, second, None, "squared_relu"), F.linear(inner, second.double()))


@needs_kernels
@pytest.mark.parametrize("after", AFTER)
def test_what_is_not_a_number_stays_so(after: str) -> None:
    x = torch.randn(9, 20)
    x[4, 3] = torch.nan
    found = run_linear(x, torch.randn(17, 20), None, after)
    assert found[4].isnan().all()
    assert found[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


@needs_kernels
@pytest.mark.parametrize("rows", [40, 600])
def test_what_lies_in_memory_otherwise(rows: int) -> None:
    x, weight = torch.randn(rows, 32), torch.randn(48, 32)
    for bias in (torch.ones(1).expand(48), torch.randn(96)[::2]):
        near(linear.linear(x, weight, bias), F.linear(x.double(), weight.double(), bias.double()))
    for other in (torch.randn(48, 64)[:, :32], torch.randn(48, 64)[:, ::2], torch.randn(1, 32).expand(48, 32)):
        near(linear.linear(x, other), F.linear(x.double(), other.double()))
    layer = Mlp(32, 64, GELU(), bias=True)
    layer.fc1.weight = torch.nn.Parameter(layer.fc1.weight.detach().t().contiguous().t())
    expected = F.linear(F.gelu(F.linear(x, layer.fc1.weight, layer.fc1.bias)), layer.fc2.weight, layer.fc2.bias)
    torch.testing.assert_close(layer(x[None], Grid(1, rows))[0], expected, rtol=1e-4, atol=1e-5)


@needs_kernels
def test_layers_that_do_not_fit_each_other_are_refused() -> None:
    layer = Mlp(32, 64, GELU(), bias=True)
    layer.fc1 = torch.nn.Linear(32, 48)
    with pytest.raises(RuntimeError, match="shapes"):
        layer(torch.randn(1, 600, 32), Grid(1, 600))


@needs_kernels
def test_many_gradients_at_once() -> None:
    x, weight, many = torch.randn(40, 32), torch.randn(48, 32), torch.randn(3, 40, 48)
    with torch.enable_grad():
        x.requires_grad_()
        out = linear.linear(x, weight)
        (found,) = torch.autograd.grad(out, x, many, is_grads_batched=True)
    torch.testing.assert_close(found, many @ weight, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(5, 33, 57), (600, 40, 35)])
def test_a_factor_and_a_summand_behind_the_squared_relu(lanes: int, shape: tuple[int, int, int]) -> None:
    rows, depth, columns = shape
    x, weight = torch.randn(rows, depth), torch.randn(columns, depth) / depth**0.5
    expected = F.linear(x.double(), weight.double()).relu().square() * 0.7 - 0.4
    near(run_linear(x, weight, None, "squared_relu", (0.7, -0.4)), expected)
    second = torch.randn(9, columns)
    near(run_mlp(x, weight, None, second, None, "squared_relu", (0.7, -0.4)), F.linear(expected, second.double()))


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1),
        (7, 13, 33),
        (300, 25, 31),
        (257, 200, 40),
        (40, 50, 300),
        (2500, 37, 64),
        (5000, 300, 200),
        (2100, 200, 700),
    ],
)
@pytest.mark.parametrize("adds", [False, True])
def test_gradients_of_weights(lanes: int, shape: tuple[int, int, int], adds: bool) -> None:
    """Of fewer rows than are taken at once, of columns that are no multiple, and of rows that several tasks share."""
    rows, high, wide = shape
    left, right = torch.randn(rows, high + 3)[:, :high], torch.randn(rows, wide)  # with rows of another length
    out, sums = torch.randn(high, wide), torch.randn(high)
    product, total = left.double().t() @ right.double(), left.double().sum(0)
    expected = (product + out, total + sums) if adds else (product, total)
    alone = out.clone()
    run_weight(left, right, out, sums, adds=adds)
    run_weight(left, right, alone, None, adds=adds)
    near(out, expected[0])
    near(alone, expected[0])
    near(sums, expected[1], 3e-6 * max(1.0, rows**0.5 / 10))


@needs_kernels
def test_gradients_of_weights_of_any_extent() -> None:
    """Few rows of very many columns, and many rows, for which no more memory is taken than some results need."""
    left, right, out = torch.randn(16, 16), torch.randn(16, 1_600_000), torch.full((16, 1_600_000), 7.0)
    run_weight(left, right, out, None, adds=False)
    near(out[:, ::1000], left.double().t() @ right[:, ::1000].double())
    left, right, out = torch.randn(20_000, 512), torch.randn(20_000, 1024), torch.empty(512, 1024)
    run_weight(left, right, out, None, adds=False)
    before = reset_peak()
    run_weight(left, right, out, None, adds=False)
    assert peak() - before < 16
    near(out, left.double().t() @ right.double(), 3e-5)


@pytest.mark.parametrize("rows", [17, 480, 600])  # a step of its own, and part of the layer
@pytest.mark.parametrize("width", [24, 37])
@pytest.mark.parametrize("bias", [True, False])
def test_a_norm_in_front_of_linear_layers(lanes: int, rows: int, width: int, bias: bool) -> None:
    x, norm = torch.randn(rows, width), Norm(torch.randn(width), torch.randn(width) if bias else None, 1e-5)
    first, second = torch.randn(50, width), torch.randn(width, 50)
    normed = F.layer_norm(x.double(), (width,), norm.weight.double(), None, 1e-5)  # type: ignore[union-attr]
    normed = normed if norm.bias is None else normed + norm.bias.double()
    expected = x.double() + F.linear(F.gelu(F.linear(normed, first.double())), second.double())

    def one_by_one(draft: Draft, x: Place) -> Place:
        hidden = draft.linear((first, None), draft.norm(norm, x, rows), rows, "gelu")
        return draft.linear((second, None), hidden, rows, onto=Sum(x))

    def together(draft: Draft, x: Place) -> Place:
        return draft.mlp((first, None), (second, None), draft.norm(norm, x, rows), rows, "gelu", (1.0, 0.0), Sum(x))

    near(computed(one_by_one, x), expected, 1e-5)
    near(computed(together, x), expected, 1e-5)


def test_a_norm_that_two_steps_read_is_written_once(lanes: int) -> None:
    x, norm, weights = torch.randn(30, 24), Norm(torch.randn(24), None, 1e-5), torch.randn(2, 24, 24)
    normed = F.layer_norm(x.double(), (24,), norm.weight.double(), None, 1e-5)  # type: ignore[union-attr]

    def write(draft: Draft, x: Place) -> Place:
        place = draft.norm(norm, x, 30)
        draft.linear((weights[0], None), place, 30)
        return draft.linear((weights[1], None), place, 30, onto=Sum(x))

    plan = drafted(write, x)
    near(plan.run(x)[0], x.double() + normed @ weights[1].double().t(), 1e-5)
    assert len(plan.memory.starts) == 2  # what is normed, and what nobody reads


def test_packed_weights_that_are_kept(lanes: int) -> None:
    """They serve any number of rows, and what becomes of the weight is not seen."""
    packed: dict[int, PackedWeight] = {}
    weight, second = torch.randn(40, 40), torch.randn(40, 40)
    plans, before = {}, weight.double()
    for rows in (20, 600):
        x = torch.randn(rows, 40)
        plans[rows] = drafted(lambda draft, x, rows=rows: draft.linear((weight, None), x, rows), x, packed=packed)
        near(plans[rows].run(x)[0], F.linear(x.double(), before))

    def together(draft: Draft, x: Place) -> Place:
        return draft.mlp((weight, None), (second, None), x, 600, "none", (1.0, 0.0), Sum(x))

    joined = drafted(together, x, packed=packed)
    for _ in range(2):
        near(joined.run(x)[0], x.double() + F.linear(F.linear(x.double(), before), second.double()), 1e-5)
    weight.zero_()
    near(plans[600].run(x)[0], F.linear(x.double(), before))
    assert len(packed) == 2


# -- norms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 5, 100])
@pytest.mark.parametrize("width", [1, 7, 32, 152])
def test_norm_of_a_product(lanes: int, tokens: int, width: int) -> None:
    wide, weight, bias = torch.randn(2, tokens, 3 * width), torch.rand(width), torch.randn(width)
    one, other, _ = wide.chunk(3, -1)
    eps = 0.1  # of one channel only that is left
    expected = F.layer_norm((one * other).double(), (width,), weight.double(), bias.double(), eps)
    near(norm_of_product(one, other, Norm(weight, bias, eps)), expected)
    near(norm_of_product(one, other, Norm(None, None, eps)), (one * other).double())
    normed = norm_of_product(one, None, Norm(weight, bias, eps))
    near(normed, F.layer_norm(one.double(), (width,), weight.double(), bias.double(), eps))


@pytest.mark.parametrize("rows", [17, 500])  # packed where they are used, and before
@pytest.mark.parametrize(("depth", "columns"), [(24, 53), (400, 32)])
def test_linear_layers_with_something_beside(lanes: int, rows: int, depth: int, columns: int) -> None:
    x, weight, bias = torch.randn(rows, depth), torch.randn(columns, depth), torch.randn(columns)
    sums = F.linear(x.double(), weight.double(), bias.double())
    beside, aside = torch.rand(rows, columns), torch.empty(rows, columns)
    out = torch.empty(rows, columns)
    assert run_linear(x, weight, bias, "onto", beside=beside, out=out) is out
    near(out, sums + beside)
    near(run_linear(x, weight, bias, "times_root", beside=beside), sums * beside.double().sqrt())
    near(run_linear(x, weight, bias, "and_gelu", aside=aside), sums)
    near(aside, F.gelu(sums))
    near(run_linear(x, weight, bias, "and_relu", (0.9, -0.4), aside=aside), 0.9 * F.relu(sums) ** 2 - 0.4)
    near(aside, F.relu(sums))
    at = 3 * torch.randn(rows, columns)
    with torch.enable_grad():
        where = at.double().requires_grad_()
        (slope,) = torch.autograd.grad(F.gelu(where).sum(), where)
    near(run_linear(x, weight.t().contiguous().t(), bias, "gelu_slope", beside=at, aside=aside), sums * slope)
    near(aside, F.gelu(at.double()))


@pytest.mark.parametrize("count", [1, 2047, 40_000])
def test_back_through_a_star_relu(lanes: int, count: int) -> None:
    gradient, kept = torch.randn(count), F.relu(torch.randn(count))
    to_x, squares, plain = run_star(gradient, kept, 1.7)
    near(to_x, gradient.double() * kept.double() * 1.7)
    assert abs(float(squares) - float((gradient.double() * kept.double() ** 2).sum())) < 1e-6 * count
    assert abs(float(plain) - float(gradient.double().sum())) < 1e-6 * count


# -- depthwise convolutions ----------------------------------------------------------------------


def depthwise_exactly(x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> Tensor:
    """(B, H, W, C), padded so that it keeps its size."""
    (height, width), (above, before) = weight.shape[2:], padding
    around = (before, width - 1 - before, above, height - 1 - above)
    image = F.pad(x.double().permute(0, 3, 1, 2), around)
    exact = None if bias is None else bias.double()
    return F.conv2d(image, weight.double(), exact, groups=len(weight)).permute(0, 2, 3, 1)


@pytest.mark.parametrize("grid", [(1, 1), (1, 200), (9, 13), (3, 70), (19, 8)])
@pytest.mark.parametrize("kernel", [(1, 3), (1, 5), (3, 1), (3, 3), (5, 5), (7, 7), (4, 2), (3, 9)])
@pytest.mark.parametrize("channels", [16, 37])
def test_depthwise(lanes: int, grid: tuple[int, int], kernel: tuple[int, int], channels: int) -> None:
    x, weight, bias = torch.randn(2, *grid, channels), torch.randn(channels, 1, *kernel), torch.randn(channels)
    centre = (kernel[0] // 2, kernel[1] // 2)
    near(convolve_channels(x, weight, bias, centre), depthwise_exactly(x, weight, bias, centre))
    within = torch.randn(2, *grid, 3 * channels)[..., channels : 2 * channels]
    last = (kernel[0] - 1, kernel[1] - 1)
    near(convolve_channels(within, weight, None, last), depthwise_exactly(within, weight, None, last))


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("kernel", [(1, 3), (3, 3)])
def test_depthwise_with_an_activation_and_turned_round(lanes: int, after: str, kernel: tuple[int, int]) -> None:
    x, weight, bias = torch.randn(2, 5, 11, 20), torch.randn(20, 1, *kernel), torch.randn(20)
    padding, follow = (kernel[0] // 2, 2), FUNCTIONS[after]  # type: ignore[index]
    near(convolve_channels(x, weight, bias, padding, after), follow(depthwise_exactly(x, weight, bias, padding)))
    turned = depthwise_exactly(x.flip(1, 2), weight, bias, padding).flip(1, 2)
    near(convolve_channels(x, weight, bias, padding, after, turned=True), follow(turned))


@pytest.mark.parametrize("grid", [(1, 1), (1, 150), (9, 13), (30, 70)])
@pytest.mark.parametrize("kernel", [(1, 3), (5, 5)])
@pytest.mark.parametrize(("channels", "normed"), [(32, True), (32, False), (43, True)])
def test_depthwise_with_a_product_and_a_norm(
    lanes: int, grid: tuple[int, int], kernel: tuple[int, int], channels: int, normed: bool
) -> None:
    wide = 3 * channels
    x, weight, bias = torch.randn(2, *grid, wide), torch.randn(wide, 1, *kernel), torch.randn(wide)
    norm, padding = torch.rand(channels) if normed else None, (kernel[0] // 2, kernel[1] // 2)
    product, aside = convolve_and_multiply(x, weight, bias, padding, (2, 0, 1), norm, 1e-5)
    parts = depthwise_exactly(x, weight, bias, padding).chunk(3, -1)
    expected = parts[2] * parts[0]
    near(product, F.layer_norm(expected, (channels,), norm.double(), None, 1e-5) if norm is not None else expected)
    near(aside, parts[1])


@needs_kernels
def test_depthwise_leaves_what_is_not_a_number_in_its_place() -> None:
    x = torch.randn(1, 40, 130, 5)
    x[0, 20, 70, 3] = torch.nan
    broken = convolve_channels(x, torch.randn(5, 1, 3, 3), None, (1, 1)).isnan()
    assert broken[0, 19:22, 69:72, 3].all()
    assert broken.sum() == 9


@needs_kernels
def test_maps_and_kernels_that_do_not_belong_together_are_refused() -> None:
    layer = DepthwiseConv(12, 7, bias=True)
    with pytest.raises(RuntimeError, match="12"):
        layer(torch.randn(1, 9, 9, 24).permute(0, 3, 1, 2))
    assert layer(torch.randn(12, 9, 9)).shape == (12, 9, 9)
    with pytest.raises(RuntimeError, match="size"):
        long_conv(torch.randn(1, 4, 6, 40), torch.randn(5, 5, 20))


@needs_kernels
def test_a_filter_is_made_anew_when_what_stands_for_its_weights_changes() -> None:
    class Twice(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    mixer = mixlab.create_model("hpx_former_pico").eval().stages[0].blocks[0].mixers[0]
    filter = mixer.get_submodule("conv.filter")
    tokens, grid = torch.randn(1, 64, mixer.get_parameter("project.weight").shape[1]), Grid(8, 8)
    parametrize.register_parametrization(filter, "decay", Twice())
    before = mixer(tokens, grid)
    torch.testing.assert_close(mixer(tokens, grid), before)
    filter.get_parameter("parametrizations.decay.original").data.mul_(5)
    assert float((mixer(tokens, grid) - before).abs().max()) > 1e-6


@needs_kernels
@pytest.mark.parametrize("kernel", [5, 7])
def test_gradients_of_depthwise_convolutions(kernel: int) -> None:
    image = torch.randn(2, 9, 11, 12).permute(0, 3, 1, 2)
    layer, gradients = DepthwiseConv(12, kernel, bias=True), []
    with torch.enable_grad():
        for dtype in (torch.float32, torch.float64):
            x = image.to(dtype).requires_grad_()
            out = layer.to(dtype)(x)
            gradients.append(torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()]))
    for single, double in zip(*gradients, strict=True):
        near(single, double, 1e-5)


@pytest.mark.parametrize("grid", [(1, 1), (1, 90), (9, 13), (20, 3)])
@pytest.mark.parametrize("kernel", [(1, 3), (3, 3), (5, 5), (7, 7), (2, 7)])
@pytest.mark.parametrize("channels", [16, 37])
def test_gradients_of_taps(lanes: int, grid: tuple[int, int], kernel: tuple[int, int], channels: int) -> None:
    x = torch.randn(3, *grid, 2 * channels)[..., channels:]
    gradient = torch.randn(3, *grid, channels)
    for padding in ((kernel[0] // 2, kernel[1] // 2), (kernel[0] - 1, 0)):
        weight = torch.zeros(channels, 1, *kernel, dtype=torch.float64)
        with torch.enable_grad():
            out = depthwise_exactly(x, weight.requires_grad_(), None, padding)
            (expected,) = torch.autograd.grad(out, weight, gradient.double())
        near(taps_gradient(x, gradient, kernel, padding), expected, 5e-6)


# -- factorised attention ------------------------------------------------------------------------


@pytest.mark.parametrize(("channels", "heads"), [(152, 8), (64, 8), (20, 1), (6, 3), (40, 2)])
@pytest.mark.parametrize("tokens", [1, 5, 130])
@pytest.mark.parametrize("prefix", [0, 1])
def test_factorised_attention(lanes: int, channels: int, heads: int, tokens: int, prefix: int) -> None:
    query, key, value = (5 * torch.randn(2, tokens + prefix, 3 * channels)).chunk(3, -1)
    seen = torch.randn(2, tokens, channels)
    exact = query.double(), key.double(), value.double()
    expected = factorised_attention_reference(*exact, heads)
    scale = (channels // heads) ** -0.5
    near(run_factor(query, key, value, heads, scale=scale), expected)
    encoded = expected + F.pad(seen.double(), (0, 0, prefix, 0)) * exact[0]
    near(run_factor(query, key, value, heads, scale=scale, near=seen, prefix=prefix), encoded)


@pytest.mark.parametrize(("channels", "heads"), [(152, 8), (64, 8), (20, 1), (6, 3), (40, 2)])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (2, 5), (2, 130)])
@pytest.mark.parametrize("prefix", [0, 1])
def test_gradients_of_factorised_attention(
    lanes: int, channels: int, heads: int, batch: int, tokens: int, prefix: int
) -> None:
    query, key, value = (3 * torch.randn(batch, tokens + prefix, 3 * channels)).chunk(3, -1)
    seen, gradient = torch.randn(batch, tokens, channels), torch.randn(batch, tokens + prefix, channels)
    scale = (channels // heads) ** -0.5
    for near_them in (None, seen):
        about: dict[str, Any] = {"heads": heads, "scale": scale, "near": near_them, "prefix": prefix}
        _, contexts = factor_and_contexts(query, key, value, **about)
        found, to_near = factor_gradient((query, key, value), contexts, gradient, **about)
        exact = [one.double().requires_grad_() for one in (query, key, value, seen)]
        with torch.enable_grad():
            out = factorised_attention_reference(exact[0], exact[1], exact[2], heads)
            if near_them is not None:
                out = out + F.pad(exact[3], (0, 0, prefix, 0)) * exact[0]
        wanted = torch.autograd.grad(out, exact, gradient.double(), allow_unused=True)
        near(found, torch.cat(wanted[:3], -1), 1e-5)
        if to_near is not None:
            near(to_near, wanted[3], 1e-5)


@pytest.mark.parametrize("kernel", [3, 5, 7])
def test_depthwise_over_some_channels_of_tokens_behind_others(lanes: int, kernel: int) -> None:
    """What it writes lies between numbers that stay as they are."""
    tokens, weight = torch.randn(2, 1 + 5 * 6, 40), torch.randn(19, 1, kernel, kernel)
    out = torch.ones(2, 1 + 5 * 6, 33)
    maps = [one[:, 1:].unflatten(1, (5, 6))[..., 7:26] for one in (tokens, out)]
    bias, around = torch.randn(19), (kernel // 2, kernel // 2)
    expected = depthwise_exactly(maps[0], weight, bias, around)
    convolve_channels(maps[0], weight, bias, around, out=maps[1])
    near(maps[1], expected)
    convolve_channels(maps[0], weight, bias, around, out=maps[1], adds=True)
    near(maps[1], 2 * expected)
    assert bool((out[:, :1] == 1).all() and (out[..., :7] == 1).all() and (out[..., 26:] == 1).all())
    to_bias = torch.empty(19)
    taps = taps_gradient(maps[0], maps[1], (kernel, kernel), around, to_bias=to_bias)
    near(taps, taps_gradient(maps[0].contiguous(), maps[1].contiguous(), (kernel, kernel), around).double())
    near(to_bias, maps[1].double().sum((0, 1, 2)))


@pytest.mark.parametrize(
    ("source", "target"), [((7, 7), (14, 14)), ((9, 4), (2, 5)), ((1, 1), (3, 2)), ((28, 28), (7, 7))]
)
@pytest.mark.parametrize("channels", [3, 19, 32])
def test_tokens_on_another_grid(lanes: int, source: tuple[int, int], target: tuple[int, int], channels: int) -> None:
    here, there = Grid(*source, 1), Grid(*target, 1)
    x, gradient = torch.randn(2, here.tokens, channels), torch.randn(2, there.tokens, channels)
    moved, back = torch.empty_like(gradient), torch.ones_like(x)
    resample_tokens(x, here, moved, there, adds=False)
    resample_tokens(gradient, here, back, there, back=True, adds=True)
    with torch.enable_grad():
        exact = x.double().requires_grad_()
        expected = move(exact, here, there)
    near(moved, expected)
    near(back, torch.autograd.grad(expected, exact, gradient.double())[0] + 1)


@needs_kernels
def test_factorised_attention_spreads_what_is_not_a_number() -> None:
    query, key, value = torch.randn(2, 9, 3 * 24).chunk(3, -1)
    key[0, 4, 3] = torch.nan
    broken = run_factor(query, key, value, 3, scale=1.0).isnan()
    assert broken[0, :, :8].all()
    assert broken.sum() == 9 * 8


@needs_kernels
@pytest.mark.parametrize("name", ["coat_tiny", "coat_lite_pico"])
def test_conv_attention_gives_what_pytorch_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = mixlab.create_model(name).eval(), torch.randn(2, 3, 96, 64)
    ours = model(x)
    monkeypatch.setattr(native, "kernels", lambda: None)
    near(ours, model(x).double(), 1e-5)


# -- recurrent steps -----------------------------------------------------------------------------


def lstm_weights(dim: int, units: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden = torch.randn(4 * units, units) / units**0.5
    return torch.randn(4 * units, dim), hidden, torch.randn(4 * units), torch.randn(4 * units)


@pytest.mark.parametrize("units", [1, 7, 16, 40])
@pytest.mark.parametrize("sides", [(1, 1), (3, 2), (5, 30), (1, 9)])
def test_lstm_over_columns_and_rows(lanes: int, units: int, sides: tuple[int, int]) -> None:
    (height, width), dim = sides, 11
    image = torch.randn(3, height, width, dim)
    layers = [[lstm_weights(dim, units) for _ in range(2)] for _ in range(2)]
    runs = [
        Run(weights, vertical=not axis, backwards=bool(index))
        for axis, directions in enumerate(layers)
        for index, weights in enumerate(directions)
    ]
    exact = [[tuple(one.double() for one in weights) for weights in directions] for directions in layers]
    columns = recurrent_reference("lstm", image.double().transpose(1, 2).flatten(0, 1), exact[0])  # type: ignore[arg-type]
    rows = recurrent_reference("lstm", image.double().flatten(0, 1), exact[1])  # type: ignore[arg-type]
    columns = columns.unflatten(0, (3, width)).transpose(1, 2)
    near(lstm_maps(image, runs), torch.cat([columns, rows.unflatten(0, (3, height))], -1), 1e-5)


# -- the matrix memory ---------------------------------------------------------------------------


def mlstm(*, bias: bool = True, scale: float = 0.3) -> Mlstm:
    torch.manual_seed(0)
    layer = Mlstm(32, MlstmOptions(bias=bias, heads=2), ROWS).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=scale)
    return layer


def exactly(layer: Mlstm, tokens: Tensor, grid: Grid) -> Tensor:
    layer.form = "recurrent"
    found: Tensor = layer.double()(tokens.double(), grid)
    layer.float().form = "chunkwise"
    return found


@pytest.mark.parametrize("sides", [(1, 1), (3, 5), (9, 13)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk", [None, 1, 7, 200])
def test_mlstm(lanes: int, sides: tuple[int, int], bias: bool, chunk: int | None) -> None:
    layer, grid = mlstm(bias=bias), Grid(*sides)
    layer.chunk = chunk
    tokens = torch.randn(2, grid.image_tokens, 32)
    wide, norm = torch.randn(2, grid.image_tokens, 64), layer.norm
    call = (wide, wide, wide, *layer.cell(), norm.weight, norm.bias, layer.skip, "chunkwise", 0, norm.eps)
    assert MLSTM_LAYER.serves(*call)
    near(layer(tokens, grid), exactly(layer, tokens, grid), 2e-5)


@pytest.mark.parametrize("conv", ["none", "causal_1d", "1d", "2d"])
@pytest.mark.parametrize("path", [*paths("oct")], ids=str)
def test_mlstm_on_every_path(lanes: int, conv: Convolution, path: Path) -> None:
    layer, grid = Mlstm(32, MlstmOptions(heads=2, conv=conv), path).eval(), Grid(5, 7)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens = torch.randn(3, 35, 32)
    near(layer(tokens, grid), exactly(layer, tokens, grid), 2e-5)


@needs_kernels
def test_a_hook_sees_the_order_of_the_walk() -> None:
    layer, grid, tokens = Mlstm(32, MlstmOptions(heads=2), BACKWARDS).eval(), Grid(3, 4), torch.randn(1, 12, 32)
    expected, seen = layer(tokens, grid), []
    layer.up.register_forward_hook(lambda _, __, out: seen.append(out))
    torch.testing.assert_close(layer(tokens, grid), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen[0], F.linear(tokens.flip(1), layer.up.weight))


@torch.enable_grad()
@pytest.mark.parametrize(("heads", "width"), [(4, 96), (2, 16), (1, 48)])
@pytest.mark.parametrize(("batch", "steps"), [(1, 1), (3, 37), (2, 130)])
@pytest.mark.parametrize("biased", [True, False])
def test_heads_of_blocks_and_their_gradients(
    lanes: int, heads: int, width: int, batch: int, steps: int, biased: bool
) -> None:
    channels = heads * width
    x, weight = torch.randn(batch, steps, channels), torch.randn(channels // 4, 4, 4)
    bias = torch.randn(channels) if biased else None
    inputs = [one.requires_grad_() for one in (x, weight, bias) if one is not None]
    assert BLOCK_HEADS.serves(x, weight, bias, heads, training=True)
    out = block_heads(x, weight, bias, heads)
    gradient = torch.randn(batch, steps, heads, width).permute(2, 0, 1, 3)
    exact = [one.detach().double().requires_grad_() for one in inputs]
    expected = heads_reference(exact[0], exact[1], exact[2] if biased else None, heads)
    near(out.detach(), expected.detach())
    wanted = torch.autograd.grad(expected, exact, gradient.double())
    for found, one in zip(torch.autograd.grad(out, inputs, gradient), wanted, strict=True):
        near(found, one, 5e-6)


@pytest.mark.parametrize("gate", [30.0, -30.0, -5000.0])
@pytest.mark.parametrize("chunk", [None, 16])
def test_mlstm_with_extreme_gates(lanes: int, gate: float, chunk: int | None) -> None:
    """Wide chunks, whose decay cannot be split; the last forgets e^-1000000 over the sequence."""
    layer, grid = mlstm(), Grid(10, 20)
    layer.chunk = chunk
    layer.forget_gate.bias.fill_(gate)
    layer.input_gate.bias.copy_(torch.tensor([abs(gate) % 100, -(abs(gate) % 100)]))
    tokens = torch.randn(1, 200, 32)
    near(layer(tokens, grid), exactly(layer, tokens, grid), 1e-4)


@needs_kernels
def test_mlstm_spreads_what_is_not_a_number() -> None:
    layer, grid = mlstm(), Grid(4, 20)
    tokens = torch.randn(2, 80, 32)
    tokens[0, 50, 3] = torch.nan
    found = layer(tokens, grid)
    assert found[0, 60:].isnan().all()
    assert found[1].isfinite().all()


# -- long convolutions ---------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [(1, 1), (1, 6), (2, 3), (7, 7), (13, 8), (25, 33)])
@pytest.mark.parametrize("kernel", [(1, 1), (3, 5), (4, 2), (33, 81)])
def test_long_convolutions_in_the_plane(lanes: int, grid: tuple[int, int], kernel: tuple[int, int]) -> None:
    x, taps, factor = torch.randn(2, *grid, 37), torch.randn(*kernel, 37), torch.randn(2, *grid, 111)[..., 37:74]
    expected = long_conv_2d(x.double(), taps.double(), form="direct")
    near(long_conv_2d(x, taps, form="native"), expected)
    near(long_conv(x, taps, factor, form="native"), expected * factor)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 2, 30, 49, 211])
def test_long_convolutions_along_a_sequence(lanes: int, causal: bool, length: int) -> None:
    x, taps, bias = torch.randn(3, length, 20), torch.randn(length if causal else 2 * length - 1, 20), torch.randn(20)
    expected = long_conv_1d(x.double(), taps.double(), bias.double(), causal=causal, form="direct")
    near(long_conv_1d(x, taps, bias, causal=causal, form="native"), expected)


@needs_kernels
def test_small_channels_do_not_suffer_from_large_ones() -> None:
    x, taps = torch.randn(1, 64, 16), torch.randn(127, 16)
    x[:, :, 0], taps[:, 1] = x[:, :, 0] * 1e6, taps[:, 1] * 1e-6
    expected = long_conv_1d(x.double(), taps.double(), form="direct")
    found = long_conv_1d(x, taps, form="native")
    for channel in range(16):
        near(found[..., channel], expected[..., channel])


@needs_kernels
@pytest.mark.parametrize("grid", [(1, 1), (1, 4), (3, 2)])
def test_factors_that_lie_in_memory_otherwise(grid: tuple[int, int]) -> None:
    x, taps = torch.randn(4, *grid, 20), torch.randn(3, 3, 20)
    expected = long_conv_2d(x.double(), taps.double(), form="direct")
    factors = [
        torch.randn(1, *grid, 20).expand(4, -1, -1, -1),
        torch.randn(8, *grid, 20)[::2],
        torch.randn(4, *grid[::-1], 20).transpose(1, 2),
        torch.randn(4, *grid, 60)[..., 40:],
        torch.randn(4, 1 + grid[0] * grid[1], 20)[:, 1:].unflatten(1, grid),
    ]
    for factor in factors:
        near(long_conv(x, taps, factor, form="native"), expected * factor)


@needs_kernels
def test_native_is_another_form_where_it_cannot_serve() -> None:
    x, taps = torch.randn(2, 9, 4, dtype=torch.float64), torch.randn(17, 4, dtype=torch.float64)
    expected = long_conv_1d(x, taps, form="direct")
    torch.testing.assert_close(long_conv_1d(x, taps, form="native"), expected)
    with torch.enable_grad():
        single = taps.float().requires_grad_()
        long_conv_1d(x.float(), single, form="native").sum().backward()
    assert single.grad is not None


# -- when they serve -----------------------------------------------------------------------------

FAMILIES = ["vil_pico", "hpx_former_pico", "hb_former_pico", "sequencer2d_pico", "caformer_pico", "coat_lite_pico"]


@needs_kernels
@pytest.mark.parametrize("name", FAMILIES)
def test_models_are_the_same_with_and_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = mixlab.create_model(name, num_classes=7).eval()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.02)
    images = torch.randn(2, 3, 65, 48)
    with_them = model(images)
    monkeypatch.setattr(native, "kernels", lambda: None)
    torch.testing.assert_close(model(images), with_them, rtol=0, atol=1e-4 * float(with_them.std()))


@needs_kernels
def test_they_serve_plain_inference_only() -> None:
    x = torch.randn(3, 4)
    assert may_run(x, None)
    assert not may_run(x.double())
    assert not may_run(x.to_mkldnn())
    assert not may_run(x[:0])
    with torch.enable_grad():
        assert may_run(x)
        assert not may_run(x, x.clone().requires_grad_())
    with torch.autocast("cpu"):
        assert not may_run(x)
    assert not torch.vmap(lambda one: torch.tensor(may_run(one)))(x).any()


@needs_kernels
def test_they_can_be_switched_off() -> None:
    code = "import mixlab.engine.kernels as n; print(n.kernels())"
    settings = {**os.environ, native.VARIABLE: "0"}
    done = subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"


@needs_kernels
def test_one_thread_finds_the_same() -> None:
    x, weight, threads = torch.randn(700, 40), torch.randn(50, 40), torch.get_num_threads()
    several = run_linear(x, weight, None)
    try:
        torch.set_num_threads(1)
        assert torch.equal(run_linear(x, weight, None), several)
    finally:
        torch.set_num_threads(threads)
