import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn

from mixlab.core.grid import Grid
from mixlab.models.layers import (
    ACTIVATIONS,
    NORMS,
    SCALINGS,
    Branch,
    Mlp,
    Residual,
    Scaling,
    StochasticDepth,
    activation,
    norm,
)
from mixlab.ops.layers import normed, through_both


class Double(nn.Module):
    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        return tokens * 2


def residual(drop_rate: float, *, skip: bool, branches: int = 1, dim: int = 4) -> Residual:
    parts = [Branch(nn.Identity(), Double()) for _ in range(branches)]
    return Residual(parts, Scaling(dim), drop_rate=drop_rate, skip=skip)


@pytest.mark.parametrize("shape", [(2, 5, 7, 32), (1, 9, 48)])
@torch.inference_mode()
def test_a_norm_by_a_kernel_is_the_norm(shape: tuple[int, ...]) -> None:
    norm, x = nn.LayerNorm(shape[-1]), 3 * torch.randn(shape) + 1
    nn.init.normal_(norm.weight)
    torch.testing.assert_close(normed(norm, x), norm(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(normed(norm, x.transpose(0, 1)), norm(x).transpose(0, 1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(normed(norm, x, x), norm(x * x), rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_rows_without_a_batch_are_normed_too() -> None:
    norm, x = nn.LayerNorm(32), torch.randn(20, 32)
    assert torch.equal(normed(norm, x), norm(x))


@torch.inference_mode()
def test_a_norm_of_another_width_is_refused_by_pytorch_itself() -> None:
    with pytest.raises(RuntimeError, match="normalized_shape"):
        normed(nn.LayerNorm(16), torch.randn(2, 3, 32))


@pytest.mark.parametrize("name", ACTIVATIONS.names())
def test_an_activation_after_a_linear_layer_equals_one_after_the_other(name: str) -> None:
    act, linear, x = activation(ACTIVATIONS.parse(name)), nn.Linear(6, 25), torch.randn(300, 6)
    expected = act(linear(x))
    torch.testing.assert_close(through_both(linear, act, x), expected)
    with torch.no_grad():
        before = x.clone()
        torch.testing.assert_close(through_both(linear, act, x), expected)
        assert torch.equal(x, before)


@pytest.mark.parametrize(("learn_scale", "learn_bias"), [(True, False), (False, True), (False, False)])
def test_star_relu_learns_what_it_is_told_to(learn_scale: bool, learn_bias: bool) -> None:
    options = {"learn_scale": learn_scale, "learn_bias": learn_bias, "scale": 0.9, "bias": -0.4}
    act = activation(ACTIVATIONS.parse({"name": "star_relu", **options}))
    state = {name: (p.requires_grad, round(p.item(), 3)) for name, p in act.named_parameters()}
    assert state == {"scale": (learn_scale, 0.9), "bias": (learn_bias, -0.4)}


@pytest.mark.parametrize("name", NORMS.names())
@pytest.mark.parametrize("bias", [True, False])
def test_norms_have_unit_variance_and_a_bias_only_if_asked(name: str, bias: bool) -> None:
    layer = norm(NORMS.parse(name), 16, bias=bias)
    out = layer(torch.randn(2, 9, 16) * 3 + 1)
    torch.testing.assert_close(out.mean((1, 2)), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.var((1, 2), correction=0), torch.ones(2), atol=1e-3, rtol=0)
    assert [name for name, _ in layer.named_parameters()] == (["weight", "bias"] if bias else ["weight"])


@pytest.mark.parametrize("name", SCALINGS.names())
def test_branch_scalings_follow_equations_16_to_18(name: str) -> None:
    choice = SCALINGS.parse(name)
    scaling = SCALINGS.builder(choice)(4, **vars(choice.options))
    tokens, update = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    residual_factor = 1.0 if scaling.residual is None else scaling.residual
    branch_factor = 1.0 if scaling.branch is None else scaling.branch
    torch.testing.assert_close(scaling(tokens, update), residual_factor * tokens + branch_factor * update)
    expected = {
        "none": [],
        "layer_scale": ["branch"],
        "res_scale": ["residual"],
        "branch_scale": ["residual", "branch"],
    }
    assert [parameter for parameter, _ in scaling.named_parameters()] == expected[name]


def test_drop_rates_ramp_or_stay() -> None:
    assert StochasticDepth(0.3).rates(4) == pytest.approx([0, 0.1, 0.2, 0.3])
    assert StochasticDepth(0.3, "constant").rates(3) == pytest.approx([0.3] * 3)
    assert StochasticDepth(0.3).rates(1) == [0]


def test_several_branches_add_up() -> None:
    tokens = torch.randn(2, 3, 4)
    torch.testing.assert_close(residual(0, skip=False, branches=3)(tokens, Grid(1, 3)), tokens * 7)


@pytest.mark.parametrize("skip", [True, False])
def test_stochastic_depth_drops_samples_keeps_the_mean_and_sleeps_in_eval(skip: bool) -> None:
    layer, tokens = residual(0.25, skip=skip), torch.ones(4000, 1, 4)
    out = layer(tokens, Grid(1, 1))[:, 0, 0]
    kept = 1 + 2 / 0.75
    assert sorted(set(out.tolist())) == pytest.approx([1.0, kept])
    assert out.mean().item() == pytest.approx(3.0, abs=0.15)
    assert torch.equal(layer.eval()(tokens, Grid(1, 1)), tokens * 3)


def test_the_skipping_form_computes_only_the_kept_samples() -> None:
    layer, seen = residual(0.5, skip=True), []
    layer.branches[0].register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    layer(torch.randn(10, 2, 4), Grid(1, 2))
    layer(torch.randn(1, 2, 4), Grid(1, 2))
    assert seen == [5, 1]


def test_a_share_that_is_no_whole_number_is_rounded_at_random() -> None:
    layer, seen = residual(0.2, skip=True), []
    layer.branches[0].register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    for _ in range(300):
        layer(torch.randn(2, 1, 4), Grid(1, 1))
    assert set(seen) == {1, 2}
    assert sum(seen) / 600 == pytest.approx(0.8, abs=0.06)


def test_the_drop_rate_is_no_part_of_a_checkpoint_but_survives_a_start_without_memory() -> None:
    assert not residual(0.25, skip=False).state_dict()
    with torch.device("meta"):
        layer = Residual([Branch(nn.Identity(), Double())], Scaling(4, residual=1.0), drop_rate=0.25, skip=False)
    layer.to_empty(device="cpu").load_state_dict({"scaling.residual": torch.ones(4)})
    assert layer.keep.item() == 0.75


def mlp() -> Mlp:
    return Mlp(6, 200, activation(ACTIVATIONS.parse("star_relu")), bias=True).eval()


@torch.no_grad()
def test_hooks_on_the_parts_of_an_mlp_see_what_flows() -> None:
    layer, tokens, seen = mlp(), torch.randn(50, 3, 6), {}
    expected = layer(tokens, Grid(1, 3))
    for name in ("fc1", "act", "fc2"):
        part = layer.get_submodule(name)
        part.register_forward_hook(lambda module, inputs, output, name=name: seen.update({name: output}))
    torch.testing.assert_close(layer(tokens, Grid(1, 3)), expected)
    torch.testing.assert_close(seen["fc1"], layer.fc1(tokens))
    torch.testing.assert_close(seen["fc2"], expected)


def test_pruning_and_wrapping_the_second_layer_of_an_mlp_take_effect() -> None:
    layer, tokens = mlp(), torch.randn(50, 3, 6)
    nn.utils.prune.identity(layer.fc2, "weight")
    nn.init.zeros_(layer.get_parameter("fc2.weight_orig"))
    torch.testing.assert_close(layer(tokens, Grid(1, 3)), layer.fc2.bias.expand(50, 3, 6))


def test_forward_mode_derivatives_are_right_without_recorded_gradients() -> None:
    layer, tokens, direction = mlp().double(), torch.randn(50, 3, 6).double(), torch.randn(50, 3, 6).double()
    with torch.no_grad():
        derivative: Tensor = torch.func.jvp(lambda x: layer(x, Grid(1, 3)), (tokens,), (direction,))[1]
        change = layer(tokens + 1e-6 * direction, Grid(1, 3)) - layer(tokens - 1e-6 * direction, Grid(1, 3))
    torch.testing.assert_close(derivative, change / 2e-6, rtol=1e-4, atol=1e-6)


def test_star_relu_in_float16_does_not_overflow_before_its_scale() -> None:
    act = activation(ACTIVATIONS.parse({"name": "star_relu", "scale": 0.01})).half()
    assert act(torch.tensor([300.0]).half()).item() == pytest.approx(900, rel=0.01)


def test_branch_scalings_start_where_the_papers_say() -> None:
    start = {
        name: [round(p.mean().item(), 7) for p in SCALINGS.builder(choice)(4, **vars(choice.options)).parameters()]
        for name in SCALINGS.names()
        for choice in [SCALINGS.parse(name)]
    }
    assert start == {"none": [], "layer_scale": [1e-5], "res_scale": [1.0], "branch_scale": [1.0, 1e-5]}
