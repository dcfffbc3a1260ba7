"""Infinities, what is not a number, and overflow leave every kernel as they leave its reference in float32."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mixlab.core.grid import Grid
from mixlab.engine.kernels.attention import attention_gradient, run_attention
from mixlab.engine.kernels.depthwise import convolve_and_multiply, convolve_channels, taps_gradient
from mixlab.engine.kernels.factor import factor_and_contexts, factor_gradient, run_factor
from mixlab.engine.kernels.heads import blocks_gradient, to_heads
from mixlab.engine.kernels.linear import AFTER, run_linear, run_mlp, run_star, run_weight
from mixlab.engine.kernels.norm import Norm, norm_of_product
from mixlab.engine.kernels.pool import run_pool, run_whole_norm
from mixlab.engine.kernels.recurrent import Run, lstm_maps
from mixlab.engine.kernels.resample import resample_tokens
from mixlab.ops.activations import FUNCTIONS
from mixlab.ops.attention import attention_reference
from mixlab.ops.blockdiagonal import heads_reference
from mixlab.ops.convattention import factorised_attention_reference
from mixlab.ops.exchange import move
from mixlab.ops.longconv import long_conv_2d
from mixlab.ops.pool import pool_reference
from mixlab.ops.recurrent import recurrent_reference
from tests.engine.kernels.test_kernels import LEVELS, at_level, lstm_weights, mlstm

Spoil = Callable[[Tensor], Tensor]


@pytest.fixture(params=LEVELS, autouse=True)
def lanes(request: pytest.FixtureRequest) -> Iterator[int]:
    yield from at_level(request.param)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def with_one(value: float) -> Spoil:
    def spoil(x: Tensor) -> Tensor:
        x = x.clone()
        x[(x.shape[0] - 1, *(size // 2 for size in x.shape[1:]))] = value
        return x

    return spoil


def times(factor: float) -> Spoil:
    return lambda x: x * factor


SPOILS = {
    "infinity": with_one(torch.inf),
    "minus infinity": with_one(-torch.inf),
    "not a number": with_one(torch.nan),
    "one very large": with_one(1e30),
    "times 1e25": times(1e25),
}
spoiled = pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)


def gelu(x: Tensor) -> Tensor:
    """Without what PyTorch's own does at infinity, which depends on how many numbers it is called with."""
    exact = x.double()
    return (0.5 * exact * (1 + torch.erf(exact / 2**0.5))).to(x.dtype)


FOLLOWED: dict[str, Callable[[Tensor], Tensor]] = {**FUNCTIONS, "gelu": gelu}  # type: ignore[dict-item]


def same(ours: Tensor, reference: Tensor) -> None:
    """The same places hold infinities of the same sign and no numbers; the others hold nearly the same numbers."""
    assert ours.shape == reference.shape
    for holds in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(holds(ours), holds(reference)), holds.__name__
    finite = reference.isfinite()
    largest = reference[finite].abs().max() if finite.any() else torch.tensor(0.0)
    apart = (ours[finite].double() - reference[finite].double()).abs()
    assert bool((apart <= 1e-4 * largest + 1e-30).all())


@spoiled
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("rows", [7, 600])
def test_linear(spoil: Spoil, after: str, rows: int) -> None:
    x, weight, bias = spoil(torch.randn(rows, 40)), torch.randn(33, 40), torch.randn(33)
    same(run_linear(x, weight, bias, after), FOLLOWED[after](F.linear(x, weight, bias)))


@pytest.mark.parametrize("after", AFTER)
def test_activations_of_any_number(after: str) -> None:
    x = torch.tensor([0.0, 1e-30, 3, 5, 9, 20, 80, 88, 89, 95, 104, 1e10, 1e25, 3e38, torch.inf, torch.nan])
    x = torch.cat([x, -x])[:, None]
    out = run_linear(x, torch.ones(1, 1), None, after)
    reference = FOLLOWED[after](x)
    assert torch.equal(out.isnan(), reference.isnan())
    torch.testing.assert_close(out, reference, rtol=1e-5, atol=1e-6, equal_nan=True)


@spoiled
@pytest.mark.parametrize("rows", [7, 600])
def test_two_layers(spoil: Spoil, rows: int) -> None:
    x, first, second = spoil(torch.randn(rows, 24)), torch.randn(64, 24), torch.randn(20, 64)
    same(run_mlp(x, first, None, second, None, "gelu"), F.linear(gelu(F.linear(x, first)), second))


@spoiled
def test_gradients_through_gelu(spoil: Spoil) -> None:
    x, at, aside = torch.randn(40, 24), spoil(torch.randn(40, 20)), torch.empty(40, 20)
    weight = torch.randn(20, 24)
    with torch.enable_grad():
        where = at.clone().requires_grad_()
        (reference,) = torch.autograd.grad(gelu(where), where, F.linear(x, weight))
    same(run_linear(x, weight, None, "gelu_slope", beside=at, aside=aside), reference)
    same(aside, gelu(at))


@spoiled
def test_gradients_of_weights(spoil: Spoil) -> None:
    left, right = spoil(torch.randn(300, 20)), torch.randn(300, 24)
    out, sums = torch.empty(20, 24), torch.empty(20)
    run_weight(left, right, out, sums, adds=False)
    same(out, left.t() @ right)
    same(sums, left.sum(0))


@spoiled
def test_star(spoil: Spoil) -> None:
    gradient, kept = spoil(torch.randn(100)), F.relu(torch.randn(100))
    same(run_star(gradient, kept, 0.5)[0], gradient * kept * 0.5)


@spoiled
@pytest.mark.parametrize("width", [64, 256, 384])
def test_norms(spoil: Spoil, width: int) -> None:
    x, weight, bias = spoil(torch.randn(2, 5, width)), torch.rand(width), torch.randn(width)
    reference = F.layer_norm(x, (width,), weight, bias)
    same(norm_of_product(x, None, Norm(weight, bias, 1e-5)), reference)
    same(norm_of_product(x, torch.ones_like(x), Norm(weight, bias, 1e-5)), reference)


@pytest.mark.parametrize("spoil", [SPOILS["infinity"], SPOILS["not a number"], SPOILS["times 1e25"]])
def test_norms_of_whole_images(spoil: Spoil) -> None:
    x, weight, bias = spoil(torch.randn(2, 200, 32)), torch.rand(32), torch.randn(32)
    reference = F.group_norm(x.mT[..., None], 1, weight, bias, 1e-5)[..., 0].mT
    same(run_whole_norm(x, Norm(weight, bias, 1e-5)), reference)


@spoiled
@pytest.mark.parametrize("kernel", [(1, 3), (3, 3), (7, 7), (3, 9)])
@pytest.mark.parametrize("after", ["none", "silu"])
def test_depthwise(spoil: Spoil, kernel: tuple[int, int], after: str) -> None:
    x, weight, bias = spoil(torch.randn(2, 9, 11, 20)), torch.randn(20, 1, *kernel), torch.randn(20)
    padding = (kernel[0] // 2, kernel[1] // 2)
    reference = F.conv2d(x.permute(0, 3, 1, 2), weight, bias, padding=padding, groups=20).permute(0, 2, 3, 1)
    same(convolve_channels(x, weight, bias, padding, after), FOLLOWED[after](reference))


@spoiled
def test_depthwise_with_a_product_and_a_norm(spoil: Spoil) -> None:
    x, weight, norm = spoil(torch.randn(2, 5, 7, 192)), torch.randn(192, 1, 3, 3), torch.rand(64)
    seen = F.conv2d(x.permute(0, 3, 1, 2), weight, padding=1, groups=192).permute(0, 2, 3, 1).chunk(3, -1)
    product, aside = convolve_and_multiply(x, weight, None, (1, 1), (0, 1, 2), norm, 1e-5)
    same(product, F.layer_norm(seen[0] * seen[1], (64,), norm, None, 1e-5))
    same(aside, seen[2])


@spoiled
def test_gradients_of_taps(spoil: Spoil) -> None:
    x, gradient, weight = torch.randn(2, 9, 11, 20), spoil(torch.randn(2, 9, 11, 20)), torch.randn(20, 1, 3, 3)
    to_bias = torch.empty(20)
    to_taps = taps_gradient(x, gradient, (3, 3), (1, 1), to_bias=to_bias)
    with torch.enable_grad():
        taps = weight.requires_grad_()
        out = F.conv2d(x.permute(0, 3, 1, 2), taps, padding=1, groups=20)
        (reference,) = torch.autograd.grad(out, taps, gradient.permute(0, 3, 1, 2))
    assert torch.equal(to_taps.isfinite().flatten(1).all(1), reference.isfinite().flatten(1).all(1))
    same(to_bias, gradient.sum((0, 1, 2)))


@spoiled
@pytest.mark.parametrize("part", [0, 1, 2])
def test_attention_and_its_gradient(spoil: Spoil, part: int) -> None:
    parts = list(torch.randn(2, 30, 3 * 48).chunk(3, -1))
    parts[part] = spoil(parts[part])
    qkv, logs, gradient = torch.cat(parts, -1), torch.empty(2, 3, 30), torch.randn(2, 30, 48)
    out = run_attention(qkv, 3, logs)
    with torch.enable_grad():
        where = qkv.clone().requires_grad_()
        reference = attention_reference(where, 3)
        (wanted,) = torch.autograd.grad(reference, where, gradient)
    same(out, reference.detach())
    to_qkv = attention_gradient(qkv, 3, out, logs, gradient)
    assert torch.equal(to_qkv.isfinite().all((1, 2)), wanted.isfinite().all((1, 2)))


@spoiled
@pytest.mark.parametrize("part", [0, 1, 2])
def test_factorised_attention_and_its_gradient(spoil: Spoil, part: int) -> None:
    parts = list(torch.randn(2, 60, 3 * 48).chunk(3, -1))
    parts[part] = spoil(parts[part])
    query, key, value = torch.cat(parts, -1).chunk(3, -1)
    gradient = torch.randn(2, 60, 48)
    about = {"heads": 3, "scale": 0.25, "near": None, "prefix": 0}
    _, contexts = factor_and_contexts(query, key, value, **about)  # type: ignore[arg-type]
    to_qkv, _ = factor_gradient((query, key, value), contexts, gradient, **about)  # type: ignore[arg-type]
    with torch.enable_grad():
        where = [one.clone().requires_grad_() for one in (query, key, value)]
        reference = factorised_attention_reference(where[0], where[1], where[2], 3)
        wanted = torch.cat(torch.autograd.grad(reference, where, gradient), -1)
    same(run_factor(query, key, value, 3, scale=0.25), reference.detach())
    assert torch.equal(to_qkv.isfinite().all((1, 2)), wanted.isfinite().all((1, 2)))


@spoiled
def test_pool_and_its_gradient(spoil: Spoil) -> None:
    x = spoil(torch.randn(2, 9, 7, 20))
    with torch.enable_grad():
        where = torch.randn(2, 63, 20).requires_grad_()
        (back,) = torch.autograd.grad(pool_reference(where, Grid(9, 7), 3), where, x.flatten(1, 2))
    same(run_pool(x, 3).flatten(1, 2), pool_reference(x.flatten(1, 2), Grid(9, 7), 3))
    same(run_pool(x, 3, back=True).flatten(1, 2), back)


@spoiled
@pytest.mark.parametrize(("source", "target"), [((7, 7), (14, 14)), ((9, 4), (3, 5)), ((4, 4), (8, 8))])
def test_tokens_on_another_grid(spoil: Spoil, source: tuple[int, int], target: tuple[int, int]) -> None:
    here, there = Grid(*source, 1), Grid(*target, 1)
    x, moved = spoil(torch.randn(2, here.tokens, 19)), torch.empty(2, there.tokens, 19)
    resample_tokens(x, here, moved, there, adds=False)
    same(moved, move(x, here, there))


@spoiled
def test_lstm(spoil: Spoil) -> None:
    image, weights = spoil(torch.randn(2, 5, 9, 11)), lstm_weights(11, 20)
    reference = recurrent_reference("lstm", image.flatten(0, 1), [weights]).unflatten(0, (2, 5))
    same(lstm_maps(image, [Run(weights, vertical=False, backwards=False)]), reference)


@spoiled
def test_heads_and_their_gradients(spoil: Spoil) -> None:
    x, weight = spoil(torch.randn(2, 37, 64)), torch.randn(16, 4, 4)
    same(to_heads(x, weight, None, 2), heads_reference(x, weight, None, 2))
    gradient = torch.randn(2, 2, 37, 32)
    with torch.enable_grad():
        blocks = weight.requires_grad_()
        (reference,) = torch.autograd.grad(heads_reference(x, blocks, None, 2), blocks, gradient)
    same(blocks_gradient(x, gradient)[0], reference)


@spoiled
def test_long_convolutions(spoil: Spoil) -> None:
    x, taps = spoil(torch.randn(2, 9, 8, 37)), torch.randn(5, 5, 37)
    ours, reference = long_conv_2d(x, taps, form="native"), long_conv_2d(x, taps, form="fft")
    assert torch.equal(ours.isfinite().all(2).all(1), reference.isfinite().all(2).all(1))
    finite = reference.isfinite()
    torch.testing.assert_close(
        ours[finite], reference[finite], rtol=1e-4, atol=1e-4 * float(reference[finite].abs().max())
    )


@spoiled
def test_mlstm(spoil: Spoil) -> None:
    layer, grid = mlstm(), Grid(6, 10)
    tokens = spoil(torch.randn(2, 60, 32))
    ours = layer(tokens, grid)
    layer.form = "recurrent"
    reference = layer(tokens, grid)
    assert torch.equal(ours.isfinite().all(-1), reference.isfinite().all(-1))
    finite = reference.isfinite() & ours.isfinite()
    if finite.any():
        torch.testing.assert_close(
            ours[finite], reference[finite], rtol=1e-3, atol=1e-3 * float(reference[finite].abs().max())
        )
