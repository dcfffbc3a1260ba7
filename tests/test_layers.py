import pytest
import torch
from torch import Tensor, nn

from mixlab.grid import Grid
from mixlab.layers import ACTIVATIONS, NORMS, SCALINGS, Branch, Residual, Scaling, StochasticDepth, activation, norm


class Double(nn.Module):
    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        return tokens * 2


def residual(drop_rate: float, *, skip: bool, branches: int = 1, dim: int = 4) -> Residual:
    parts = [Branch(nn.Identity(), Double()) for _ in range(branches)]
    return Residual(parts, Scaling(dim), drop_rate=drop_rate, skip=skip)


@pytest.mark.parametrize("name", ACTIVATIONS.names())
def test_an_activation_into_a_linear_layer_equals_one_after_the_other(name: str) -> None:
    act, linear, x = activation(ACTIVATIONS.parse(name)), nn.Linear(6, 5), torch.randn(300, 6)
    expected = linear(act(x))
    torch.testing.assert_close(act.into(x.clone(), linear), expected)
    with torch.no_grad():
        torch.testing.assert_close(act.into(x.clone(), linear), expected)


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
    layer.branches[0].mixer.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    layer(torch.randn(10, 2, 4), Grid(1, 2))
    layer(torch.randn(1, 2, 4), Grid(1, 2))
    assert seen == [5, 1]


def test_the_drop_rate_is_no_part_of_a_checkpoint() -> None:
    assert not residual(0.5, skip=False).state_dict()
