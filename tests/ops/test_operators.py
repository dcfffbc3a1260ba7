"""Every operator as the dispatcher sees it, beside its reference, by each backend and in ways that have none."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import mixlab.engine.backends as backends
from mixlab.ops.operator import OPERATORS, Operator

RANDOM = torch.Generator().manual_seed(0)
GRID = (3, 5, 0)
TOKENS_GRID = (3, 5, 2)
assert backends


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=RANDOM)


def cell_weights(bias: bool) -> list[Tensor | None]:
    weights: list[Tensor | None] = []
    for _ in range(3):
        weights += [random(8, 4, 4) / 2, random(32) if bias else None]
    return [*weights, random(4, 96) / 10, random(4), random(32), random(32) if bias else None, random(32)]


def lstm_weights() -> list[Tensor]:
    return [random(*shape) / 3 for shape in ((20, 7), (20, 5), (20,), (20,))]


Case = tuple[str, tuple[Any, ...]]
CASES: dict[str, Case] = {
    "linear": ("linear", (random(2, 19, 21), random(33, 21), random(33), None, None, "none")),
    "linear without bias": ("linear", (random(2, 19, 21), random(33, 21), None, None, None, "none")),
    "linear of few rows": ("linear", (random(3, 21), random(33, 21), random(33), None, None, "none")),
    "linear and GELU": ("linear", (random(2, 19, 21), random(33, 21), random(33), None, None, "gelu")),
    "linear and squared ReLU": ("linear", (random(2, 19, 21), random(33, 21), None, None, None, "squared_relu")),
    "linear and StarReLU": (
        "linear",
        (random(2, 19, 21), random(33, 21), random(33), torch.tensor([0.9]), torch.tensor([-0.4]), "star_relu"),
    ),
    "mlp": (
        "mlp",
        (random(2, 301, 9), random(23, 9), random(23), random(9, 23), random(9), None, None, "gelu"),
    ),
    "mlp without bias": ("mlp", (random(601, 9), random(23, 9), None, random(9, 23), None, None, None, "squared_relu")),
    "mlp with ReLU": ("mlp", (random(601, 9), random(23, 9), random(23), random(9, 23), None, None, None, "relu")),
    "mlp with StarReLU": (
        "mlp",
        (
            *(random(2, 301, 9), random(23, 9), random(23), random(9, 23), random(9)),
            *(torch.tensor([0.9]), torch.tensor([-0.4]), "star_relu"),
        ),
    ),
    "layer_norm": ("layer_norm", (random(2, 7, 13), None, random(13), random(13), 1e-6)),
    "layer_norm of a product": ("layer_norm", (random(2, 7, 13), random(2, 7, 13), random(13), None, 1e-6)),
    "global_norm": ("global_norm", (random(2, 7, 13), random(13), random(13), 1e-6)),
    "global_norm without bias": ("global_norm", (random(2, 7, 13), random(13), None, 1e-6)),
    "squared_relu": ("squared_relu", (random(3, 5),)),
    "star_relu": ("star_relu", (random(3, 5), torch.tensor([0.9]), torch.tensor([-0.4]))),
    "depthwise": ("depthwise", (random(2, 7, 11, 9).permute(0, 3, 1, 2), random(9, 1, 7, 7), random(9), [3, 3])),
    "depthwise without bias": ("depthwise", (random(2, 9, 7, 11), random(9, 1, 5, 5), None, [2, 2])),
    "depthwise in a row": ("depthwise", (random(2, 9, 3, 11), random(9, 1, 1, 9), random(9), [0, 4])),
    "attention": ("attention", (random(2, 15, 36), 3)),
    "conv_attention": (
        "conv_attention",
        (
            random(2, 17, 48),
            [random(4, 1, 3, 3), random(12, 1, 5, 5), random(4), random(12)],
            *(4, TOKENS_GRID, True, False),
        ),
    ),
    "conv_attention without bias": (
        "conv_attention",
        (random(2, 15, 96), [random(32, 1, 3, 3), None], 2, GRID, False, False),
    ),
    "conv_attention without windows": ("conv_attention", (random(2, 17, 48), [], 1, TOKENS_GRID, True, False)),
    "conv_attention with a softmax": ("conv_attention", (random(2, 17, 48), [], 1, TOKENS_GRID, True, True)),
    "conv_position": ("conv_position", (random(2, 17, 12), random(12, 1, 3, 3), random(12), TOKENS_GRID)),
    "conv_position without bias": ("conv_position", (random(2, 15, 12), random(12, 1, 3, 3), None, GRID)),
    "pool": ("pool", (random(2, 15, 7), GRID, 3)),
    "exchange": ("exchange", ([random(2, 17, 6), random(2, 14, 6)], [3, 5, 2, 6, 2, 2])),
    "block_heads": ("block_heads", (random(2, 7, 32), random(8, 4, 4), random(32), 2)),
    "block_heads without bias": ("block_heads", (random(2, 7, 32), random(8, 4, 4), None, 2)),
    "block_heads of other blocks": ("block_heads", (random(2, 7, 30), random(10, 3, 3), random(30), 2)),
    "causal_product": ("causal_product", (random(2, 3, 7, 5), random(2, 3, 7, 5), random(2, 3, 7, 4))),
    "mlstm_layer": (
        "mlstm_layer",
        (random(2, 9, 32), random(2, 9, 32), random(2, 9, 32), *cell_weights(True), "chunkwise", 0, 1e-5),
    ),
    "mlstm_layer without bias": (
        "mlstm_layer",
        (random(2, 9, 32), random(2, 9, 32), random(2, 9, 32), *cell_weights(False), "chunkwise", 4, 1e-5),
    ),
    "recurrent_maps": (
        "recurrent_maps",
        (
            random(2, 3, 5, 7),
            [weight for _ in range(4) for weight in lstm_weights()],
            *("lstm", [True, True, False, False], [False, True, False, True]),
        ),
    ),
    "long_conv": ("long_conv", (random(2, 11, 6), random(21, 6), random(2, 11, 6), False, "")),
    "long_conv that is causal": ("long_conv", (random(2, 11, 6), random(11, 6), None, True, "")),
    "long_conv over a plane": ("long_conv", (random(2, 5, 7, 6), random(9, 13, 6), None, False, "")),
}
IDS = list(CASES)


def given(name: str, dtype: torch.dtype = torch.float32) -> tuple[Operator, list[Any], list[Tensor]]:
    """The operator, a call of it with inputs of its own, and those of which it has a gradient."""
    operator, call = OPERATORS[CASES[name][0]], list(CASES[name][1])
    inputs: list[Tensor] = []

    def own(value: Any) -> Any:
        if isinstance(value, Tensor):
            inputs.append(value.detach().to(dtype).clone(memory_format=torch.preserve_format).requires_grad_())
            return inputs[-1]
        return [own(one) for one in value] if isinstance(value, list) else value

    return operator, [own(value) for value in call], inputs


def outputs_of(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def weighted(result: Any) -> Tensor:
    outputs = outputs_of(result)
    weights = [torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape) for out in outputs]
    return torch.stack([(out * weight).sum() for out, weight in zip(outputs, weights, strict=True)]).sum()


def assert_near(ours: Sequence[Tensor], theirs: Sequence[Tensor], share: float = 2e-4) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        other = other.to(one.dtype)
        torch.testing.assert_close(one, other, rtol=share, atol=share * max(1e-3, other.abs().max().item()))


def test_every_operator_has_a_case() -> None:
    assert {name for name, _ in CASES.values()} == set(OPERATORS) - {"decay_is_narrow"}


@pytest.mark.parametrize("name", IDS)
def test_the_dispatcher_finds_nothing_wrong(name: str) -> None:
    operator, call, _ = given(name)
    torch.library.opcheck(cast(Any, operator.operator), tuple(call), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", IDS)
def test_outputs_equal_the_reference_in_double_precision(name: str) -> None:
    (operator, call, _), (_, exact, _) = given(name), given(name, torch.float64)
    with torch.no_grad():
        expected = outputs_of(operator.reference(*exact))
        assert_near(outputs_of(operator(*call)), expected)
        with torch.inference_mode():
            assert_near(outputs_of(operator(*call)), expected)


@pytest.mark.parametrize("name", IDS)
def test_gradients_equal_the_reference_in_double_precision(name: str) -> None:
    (operator, call, inputs), (_, exact, others) = given(name), given(name, torch.float64)
    ours = torch.autograd.grad(weighted(operator(*call)), inputs)
    assert_near(ours, torch.autograd.grad(weighted(operator.reference(*exact)), others))


@pytest.mark.parametrize("name", [name for name in IDS if CASES[name][0] != "global_norm"])  # PyTorch's own crashes
def test_one_gradient_alone_equals_the_reference(name: str) -> None:
    count = len(given(name)[2])
    for place in range(count):
        found = []
        for form in (Operator.__call__, lambda operator, *call: operator.reference(*call)):
            operator, call, inputs = given(name)
            for index, one in enumerate(inputs):
                one.requires_grad_(index == place)
            found.append(torch.autograd.grad(weighted(form(operator, *call)), inputs[place])[0])
        assert_near([found[0]], [found[1]], 1e-3)


TWICE = [name for name in IDS if CASES[name][0] not in ("long_conv",)]


@pytest.mark.parametrize("name", TWICE)
def test_differentiated_twice(name: str) -> None:
    def again(form: Callable[..., Any], dtype: torch.dtype) -> tuple[Tensor, ...]:
        operator, call, inputs = given(name, dtype)
        out = torch.stack([out.pow(3).sum() for out in outputs_of(form(operator, *call))]).sum()
        gradients = torch.autograd.grad(out, inputs, create_graph=True)
        total = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        return torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)

    if CASES[name][0] == "attention":  # PyTorch's fused operator cannot be
        return
    ours = again(Operator.__call__, torch.float32)
    theirs = again(lambda operator, *call: operator.reference(*call), torch.float64)
    assert_near(ours, theirs, 5e-3)


# PyTorch's own operators have no forward mode or no gradients in batches there.
WITHOUT_FORWARD_MODE = ("recurrent_maps", "attention", "global_norm")
WITHOUT_BATCHES = ("global_norm", "recurrent_maps")


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.add(function.namespace)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", IDS)
def test_who_watches_sees_operators_of_pytorch_alone(name: str) -> None:
    operator, call, inputs = given(name)
    with Watch() as watch:
        result = weighted(operator(*call))
        torch.autograd.grad(result, inputs)
    assert "mixlab" not in watch.seen
    result = weighted(operator(*call))
    with Watch() as watch:  # the gradient alone
        ours = torch.autograd.grad(result, inputs)
    assert "mixlab" not in watch.seen
    _, exact, others = given(name, torch.float64)
    assert_near(ours, torch.autograd.grad(weighted(operator.reference(*exact)), others))


@pytest.mark.parametrize("name", [name for name in IDS if CASES[name][0] not in WITHOUT_FORWARD_MODE])
def test_forward_derivatives(name: str) -> None:
    operator, call, inputs = given(name)
    tangent = torch.ones_like(inputs[0])

    def along(form: Callable[..., Any], place: Tensor) -> Tensor:
        rest = list(call)
        rest[0] = [place, *rest[0][1:]] if isinstance(rest[0], list) else place
        return weighted(form(*rest))

    def derivative(form: Callable[..., Any]) -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(inputs[0].detach(), tangent)
            found = torch.autograd.forward_ad.unpack_dual(along(form, dual)).tangent
            assert found is not None
            return found

    with torch.no_grad():
        assert_near([derivative(operator)], [derivative(operator.reference)], 1e-3)
    assert_near([derivative(operator)], [derivative(operator.reference)], 1e-3)


@pytest.mark.parametrize("name", [name for name in IDS if CASES[name][0] not in WITHOUT_BATCHES])
def test_batches_of_gradients(name: str) -> None:
    operator, call, inputs = given(name)
    (ours, *_), (theirs, *_) = outputs_of(operator(*call)), outputs_of(operator.reference(*call))
    many = torch.randn(2, *ours.shape)
    batched = torch.autograd.grad(ours, inputs[0], many, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(theirs, inputs[0], one, retain_graph=True)[0] for one in many]
    assert_near(batched, [torch.stack(one_by_one)], 2e-3)


def test_functional_transforms_get_the_reference() -> None:
    operator, (x, *others), _ = given("linear")
    plain = operator.reference(x, *others)
    assert_near([torch.vmap(lambda row: operator(row, *others))(x)], [plain])
    along = torch.func.jvp(lambda x: operator(x, *others), (x,), (torch.ones_like(x),))[1]
    assert_near([along], [operator.reference(torch.ones_like(x), others[0], None, *others[2:])])
    gradient = torch.func.grad(lambda x: operator(x, *others).sum())(x)
    assert_near([gradient], [others[0].sum(0).expand_as(x)])


def test_autocast_decides_as_for_pytorchs_own_operators() -> None:
    operator, call, _ = given("linear")
    with torch.autocast("cpu", torch.bfloat16):
        assert operator(*call).dtype is torch.bfloat16


def test_counters_see_the_products() -> None:
    operator, call, inputs = given("linear")
    with FlopCounterMode(display=False) as counter:
        operator(*call)
    assert counter.get_total_flops() == 2 * 2 * 19 * 21 * 33
    out = operator(*call).sum()
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(out, inputs[:2])
    assert counter.get_total_flops() == 2 * 2 * 2 * 19 * 21 * 33


def test_tracers_write_operators_of_pytorch() -> None:
    operator, call, _ = given("linear")
    others = [one.detach() if isinstance(one, Tensor) else one for one in call[1:]]
    traced = torch.jit.trace(lambda x: operator(x, *others), (call[0].detach(),))
    assert "mixlab::" not in str(traced.graph)


class Marked(Tensor):
    """A subclass that says which operators it meets."""

    seen: set[str] = set()

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        cls.seen.add(str(function))
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_weight_that_is_a_subclass_gets_the_reference() -> None:
    operator, (x, weight, *others), _ = given("linear")
    out = operator(x, weight.detach().as_subclass(Marked), *others)
    assert_near([out.as_subclass(Tensor)], [operator.reference(x, weight, *others)])
    assert operator.reasons(x, weight.as_subclass(Marked), *others)["kernel"]


def test_numbers_whose_sign_is_turned_when_they_are_read() -> None:
    operator, (x, *others), _ = given("attention")
    turned = torch.view_as_complex(torch.randn(*x.shape, 2)).conj().imag
    assert turned.is_neg()
    with torch.no_grad():
        assert_near([operator(turned, *others)], [operator.reference(turned.clone(), *others)])


def test_every_backend_says_why_it_does_not_serve() -> None:
    operator, (x, *others), _ = given("linear")
    for reason in operator.reasons(x.double(), *others).values():
        assert reason is not None
        assert "float32" in reason or "activation" in reason or "StarReLU" in reason
