import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import mixlab
from mixlab.core.compat import has_onednn_products
from mixlab.core.grid import Grid
from mixlab.engine.backends import mlp as module
from mixlab.engine.backends.linear import Gradients, layer_gradients
from mixlab.engine.backends.mlp import rows_in_cache
from mixlab.models.layers import ACTIVATIONS, Activation, Mlp, ReLU, activation
from mixlab.ops.layers import through, through_both
from mixlab.ops.linear import LINEAR, linear, linear_reference

onednn = pytest.mark.skipif(not has_onednn_products(), reason="this PyTorch has no oneDNN")


def parts(rows: tuple[int, ...], dim: int, out: int, *, bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
    return torch.randn(*rows, dim), torch.randn(out, dim) / dim**0.5, torch.randn(out) if bias else None


@given(
    rows=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
    dim=st.integers(1, 70),
    out=st.integers(1, 70),
    bias=st.booleans(),
    activation=st.sampled_from(["none", "gelu"]),
)
def test_every_shape_equals_the_reference(
    rows: tuple[int, ...], dim: int, out: int, bias: bool, activation: str
) -> None:
    inputs = parts(rows, dim, out, bias=bias)
    with torch.no_grad():
        fast, plain = linear(*inputs, activation=activation), linear_reference(*inputs, activation=activation)  # type: ignore[arg-type]
    assert fast.shape == plain.shape == (*rows, out)
    torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-5)


@onednn
def test_views_with_gaps_are_read_right() -> None:
    whole, weight, bias = torch.randn(3, 7, 24), torch.randn(5, 8), torch.randn(5)
    with torch.no_grad():
        for view in (whole[..., 8:16], whole[:, 1:, :8], whole.transpose(0, 1)[..., 16:]):
            torch.testing.assert_close(linear(view, weight, bias), F.linear(view, weight, bias), rtol=1e-5, atol=1e-5)


@onednn
def test_only_plain_numbers_take_the_fast_way() -> None:
    x, weight, bias = parts((4,), 8, 6)

    def fast(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
        return LINEAR.serves(x, weight, bias, None, None, "none")

    assert fast(x, weight, bias)
    assert not fast(x.double(), weight.double())
    assert not fast(x.to("meta"), weight.to("meta"))
    assert not fast(x[:0], weight, bias)
    assert not fast(x[0], weight, bias)
    assert not fast(x[:, :5], weight, bias)
    assert not fast(x, weight, torch.ones(1))
    assert not fast(x, weight.to_sparse_csr(), bias)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not fast(x, weight, bias)


@onednn
def test_wrong_shapes_are_told_in_pytorchs_words() -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        linear(torch.randn(4, 8), torch.randn(6, 10))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["relu", "gelu", "squared_relu", "star_relu"])
def test_what_is_not_a_number_stays_so(name: str, value: float) -> None:
    layer, x = mlp(name, bias=True), torch.randn(1, 40, 12)
    with torch.no_grad():
        layer.fc1.bias[3] = value
        expected = layer.fc2(layer.act(layer.fc1(x)))
        assert torch.equal(layer(x, Grid(1, 40)).isfinite(), expected.isfinite())
        behind, written = through_both(layer.fc1, layer.act, x), layer.act(layer.fc1(x))
        assert torch.equal(behind.isfinite(), written.isfinite())
        if value != float("inf"):  # of which PyTorch's GELU makes no number with AVX-512, and itself with AVX2
            assert torch.equal(behind.isnan(), written.isnan())


def test_counters_still_see_the_products() -> None:
    model = mixlab.create_model("convformer_pico").eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.randn(1, 3, 64, 64))
    assert counter.get_total_flops() > 1e6


def mlp(name: str, dim: int = 12, hidden: int = 40, *, bias: bool) -> Mlp:
    act = activation(ACTIVATIONS.parse(name))
    if name == "star_relu":
        with torch.no_grad():
            act.scale.fill_(0.9)  # type: ignore[operator]
            act.bias.fill_(-0.4)  # type: ignore[operator]
    return Mlp(dim, hidden, act, bias=bias).eval()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [3, 700])
@pytest.mark.parametrize("name", ["relu", "gelu", "squared_relu", "star_relu"])
def test_an_mlp_by_rows_equals_one_layer_after_the_other(
    name: str, tokens: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IN_CACHE", 256 * 4 * 40)  # 256 rows of the wide layer
    layer, x = mlp(name, bias=bias), torch.randn(2, tokens, 12)
    expected = layer.fc2(layer.act(layer.fc1(x)))
    with torch.no_grad():
        torch.testing.assert_close(layer(x, Grid(1, tokens)), expected, rtol=1e-5, atol=1e-5)


def test_hooks_and_replaced_layers_of_an_mlp_are_called() -> None:
    layer, x, seen = mlp("gelu", bias=True), torch.randn(1, 5, 12), []
    with torch.no_grad():
        for listen in (layer.act.register_forward_hook, nn.modules.module.register_module_forward_hook):
            hook = listen(lambda module, *_: seen.append(module))
            layer(x, Grid(1, 5))
            hook.remove()
            assert layer.act in seen
            seen.clear()
        plain = layer(x, Grid(1, 5))
        setattr(layer.fc2, "forward", lambda hidden: nn.Linear.forward(layer.fc2, hidden) + 1)  # noqa: B010
        torch.testing.assert_close(layer(x, Grid(1, 5)), plain + 1, rtol=1e-5, atol=1e-5)
        layer.fc1 = Doubled(layer.fc1)  # type: ignore[assignment]
        torch.testing.assert_close(layer(x, Grid(1, 5)), layer.fc2(layer.act(layer.fc1(x))), rtol=1e-5, atol=1e-5)


class Six(ReLU):
    """Somebody's change of a known activation."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(x)


def test_a_subclass_with_a_forward_of_its_own_is_taken_at_its_word() -> None:
    layer, x = Mlp(6, 20, Six(), bias=True).eval(), 20 * torch.randn(2, 4, 6)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, Grid(2, 2)), layer.fc2(F.relu6(layer.fc1(x))), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(through_both(layer.fc1, Six(), x), F.relu6(layer.fc1(x)), rtol=1e-5, atol=1e-5)


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


class Half(Activation):
    """An activation of somebody who knows nothing of fused layers."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def test_a_new_activation_needs_only_a_forward() -> None:
    layer, x = Mlp(6, 9, Half(), bias=True).eval(), torch.randn(2, 4, 6)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, Grid(2, 2)), layer.fc2(layer.fc1(x) / 2), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(through_both(layer.fc1, Half(), x), layer.fc1(x) / 2)


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (255, 10**6), (25088, 256), (1000, 2048)])
def test_rows_are_cut_into_equal_pieces_that_fit(rows: int, width: int) -> None:
    step = rows_in_cache(rows, width)
    pieces = -(-rows // step)
    assert 1 <= step <= max(256, module.IN_CACHE // (4 * width))
    assert pieces * step - rows < pieces


def test_edits_through_data_are_seen_at_once() -> None:
    layer, x = nn.Linear(5, 4).eval(), torch.randn(3, 5)
    with torch.no_grad():
        before = through(layer, x)
        layer.weight.data.mul_(2)
        layer.bias.data.mul_(2)
        torch.testing.assert_close(through(layer, x), 2 * before)
        assert torch.equal(through(copy.deepcopy(layer), x), through(layer, x))


def test_models_are_made_of_plain_linear_layers() -> None:
    """Tools for quantization, adapters and counting look for the type."""
    model = mixlab.create_model("convformer_pico")
    assert {type(module) for module in model.modules() if isinstance(module, nn.Linear)} == {nn.Linear}


def gradients(form: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    own = [one.clone().requires_grad_() for one in inputs]
    return list(torch.autograd.grad(form(*own).square().sum(), own))


@onednn
@pytest.mark.parametrize("shape", [(7,), (2, 5), (2, 3, 4), (3, 40)])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_equal_those_of_the_reference(shape: tuple[int, ...], bias: bool) -> None:
    inputs = tuple(one for one in parts(shape, 24, 32, bias=bias) if one is not None)
    for fast, plain in zip(gradients(linear, inputs), gradients(linear_reference, inputs), strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-4)


@onednn
def test_gradients_of_gradients_equal_those_of_the_reference() -> None:
    found = []
    for form in (linear, linear_reference):
        torch.manual_seed(0)
        x, weight, bias = (one.requires_grad_() for one in parts((20,), 24, 32) if one is not None)
        first = torch.autograd.grad(form(x, weight, bias).pow(3).sum(), (x, weight), create_graph=True)
        found.append(torch.autograd.grad(torch.stack([one.square().sum() for one in first]).sum(), (x, weight, bias)))
    for fast, plain in zip(*found, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-3, atol=1e-4 * float(plain.abs().max()))


@onednn
def test_counters_of_a_backward_pass_see_its_products() -> None:
    x, weight, bias = (one.requires_grad_() for one in parts((40,), 24, 32) if one is not None)
    counted = []
    for form in (linear, linear_reference):
        out = form(x, weight, bias).sum()
        with FlopCounterMode(display=False) as counter:
            out.backward()
        counted.append(counter.get_total_flops())
    assert counted == [2 * 2 * 40 * 24 * 32] * 2


@onednn
@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_of_a_layer_are_summed_up_over_pieces(bias: bool, expanded: bool) -> None:
    """By the kernel and by the BLAS, which has pieces of few rows and gradients without memory of their own."""
    gradient, x = torch.randn(1 if expanded else 300, 33).expand(300, -1), torch.randn(300, 40)
    found: Gradients = (None, None)
    with torch.no_grad():
        for rows in (slice(0, 5), slice(5, 150), slice(150, 290), slice(290, 300)):
            found = layer_gradients(gradient[rows], x[rows], bias=bias, onto=found)
        alone = layer_gradients(gradient, None, bias=bias)
    expected = [gradient.double().t() @ x.double(), gradient.double().sum(0) if bias else None]
    for one, wanted in zip((*found, *alone), (*expected, None, expected[1]), strict=True):
        assert (one is None) == (wanted is None)
        if one is not None and wanted is not None:
            torch.testing.assert_close(one, wanted.float(), rtol=1e-4, atol=1e-4)


@onednn
@pytest.mark.parametrize("rows", [5, 40])
def test_frozen_inputs_and_weights_get_no_gradient(rows: int) -> None:
    x, weight, bias = parts((rows,), 24, 32)
    for wanted in ([0], [1], [2], [0, 2]):
        own = [
            one.clone().requires_grad_(index in wanted)
            for index, one in enumerate((x, weight, bias))
            if one is not None
        ]
        linear(own[0], own[1], own[2]).sum().backward()
        assert [index for index, one in enumerate(own) if one.grad is not None] == wanted
    assert not linear(x, weight, bias).requires_grad


@onednn
def test_functional_transforms_and_forward_derivatives_work() -> None:
    x, weight, bias = parts((5,), 24, 32)
    batched = torch.vmap(lambda row: linear(row, weight, bias))(x)
    torch.testing.assert_close(batched, F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)
    along = torch.func.jvp(lambda one: linear(one, weight, bias), (x,), (torch.ones_like(x),))[1]
    torch.testing.assert_close(along, F.linear(torch.ones_like(x), weight), rtol=1e-5, atol=1e-5)
    to_x = torch.func.grad(lambda one: linear(one, weight, bias).sum())(x)
    torch.testing.assert_close(to_x, weight.sum(0).expand_as(x), rtol=1e-5, atol=1e-5)


@onednn
def test_training_takes_any_rows_and_keeps_only_what_gradients_need() -> None:
    weight, bias = torch.randn(32, 24, requires_grad=True), torch.randn(32, requires_grad=True)
    linear(torch.randn(24), weight, bias).sum().backward()
    x, kept = torch.randn(5, 24, requires_grad=True), []

    def keep(one: Tensor) -> Tensor:
        kept.append(tuple(one.shape))
        return one

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        linear(x, weight.detach(), bias)
    assert kept == [(32, 24)]
    found = linear(x, weight, bias)
    rows = torch.autograd.grad(found, x, torch.eye(5)[..., None].expand(-1, -1, 32), is_grads_batched=True)[0]
    torch.testing.assert_close(rows.sum(0), weight.sum(0).expand(5, -1), rtol=1e-4, atol=1e-4)
