import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mixlab.core.errors import ConfigError
from mixlab.core.grid import Grid
from mixlab.models.mixers import MIXERS
from mixlab.models.mixers.mlstm import ROWS, Mlstm, MlstmOptions, Path, from_visit, paths, places, to_visit
from mixlab.ops.blockdiagonal import block_diagonal
from mixlab.ops.mlstm import mlstm_recurrent
from tests.models.mixers.contract import MixerContract


def layer(path: Path = ROWS, dim: int = 16, **options: Any) -> Mlstm:
    """A layer whose gates and biases are not at their start values."""
    torch.manual_seed(0)
    made = Mlstm(dim, MlstmOptions(**{"bias": True, **options}), path)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


class TestMlstm(MixerContract):
    name = "mlstm"
    options = {"bias": True}
    spatial = False


class TestColumns(MixerContract):
    name = "mlstm"
    options = {"directions": "quad", "bias": False, "conv": "1d"}
    spatial = False


class TestCausal(MixerContract):
    name = "mlstm"
    options = {"conv": "causal_1d", "kernel": 4, "form": "parallel", "expansion": 1.0}
    spatial = False


class TestWithoutConvolution(MixerContract):
    name = "mlstm"
    options = {"conv": "none", "form": "recurrent", "class_tokens": "start"}
    spatial = False


def test_the_layer_is_what_the_paper_draws() -> None:
    """Written out step by step from Figure 2 and the notes, for one backwards block."""
    grid, made = Grid(4, 5), layer(Path(backwards=True))
    tokens = torch.randn(2, 20, 16)
    flipped = tokens.flip(1)  # everything happens on the flipped sequence
    value_source, gate = made.up(flipped), made.gate(flipped)
    assert made.conv is not None
    assert made.norm.bias is not None
    map_ = value_source.transpose(1, 2).unflatten(2, (4, 5))
    conv = F.silu(F.conv2d(map_, made.conv.weight, made.conv.bias, padding=1, groups=32).flatten(2).transpose(1, 2))
    query, key = (block_diagonal(conv, part.weight, part.bias) for part in (made.query, made.key))
    value = block_diagonal(value_source, made.value.weight, made.value.bias)
    joined = torch.cat([query, key, value], -1)
    write, keep = (gate_of(joined).transpose(1, 2) for gate_of in (made.input_gate, made.forget_gate))
    heads = [part.unflatten(2, (4, 8)).transpose(1, 2) for part in (query, key, value)]
    cell, _ = mlstm_recurrent(heads[0], heads[1], heads[2], write, keep)
    normed = F.layer_norm(cell, (8,), eps=1e-5).transpose(1, 2).flatten(2) * made.norm.weight + made.norm.bias
    expected = made.down((normed + made.skip * conv) * F.silu(gate)).flip(1)
    torch.testing.assert_close(made(tokens, grid), expected, atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(made(tokens, grid), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("form", ["parallel", "recurrent"])
@pytest.mark.parametrize("prefix", [0, 1, 2, 3])
def test_forms_agree(form: str, prefix: int) -> None:
    grid = Grid(9, 11, prefix)
    fast, slow = layer(Path(columns=True)), layer(Path(columns=True), form=form)
    slow.load_state_dict(fast.state_dict())
    tokens = torch.randn(2, grid.tokens, 16)
    torch.testing.assert_close(fast(tokens, grid), slow(tokens, grid), atol=1e-4, rtol=1e-4)


# Where each traversal of Figure 4 has been when it reaches the middle of a 3 x 3 grid, without a convolution
SEEN = {
    Path(): [[1, 1, 1], [1, 1, 0], [0, 0, 0]],
    Path(backwards=True): [[0, 0, 0], [0, 1, 1], [1, 1, 1]],
    Path(columns=True): [[1, 1, 0], [1, 1, 0], [1, 0, 0]],
    Path(columns=True, backwards=True): [[0, 0, 1], [0, 1, 1], [0, 1, 1]],
    Path(mirrored=True): [[1, 1, 1], [0, 1, 1], [0, 0, 0]],
    Path(mirrored=True, backwards=True): [[0, 0, 0], [1, 1, 0], [1, 1, 1]],
    Path(columns=True, mirrored=True): [[0, 1, 1], [0, 1, 1], [0, 0, 1]],
    Path(columns=True, mirrored=True, backwards=True): [[1, 0, 0], [1, 1, 0], [1, 1, 0]],
}


@pytest.mark.parametrize("path", SEEN)
def test_a_traversal_has_seen_what_figure_4_shows(path: Path) -> None:
    made, tokens = layer(path, conv="none").double(), torch.randn(1, 9, 16, dtype=torch.float64, requires_grad=True)
    made(tokens, Grid(3, 3))[0, 4].sum().backward()
    assert tokens.grad is not None
    seen = tokens.grad[0].abs().sum(-1).reshape(3, 3) > 0
    assert seen.int().tolist() == SEEN[path]


def test_directions_are_those_of_figure_4() -> None:
    assert [len(paths(directions)) for directions in ("uni", "bi", "quad", "oct")] == [1, 2, 4, 8]
    assert set(paths("oct")) == set(SEEN)
    assert paths("bi") == [Path(), Path(backwards=True)]


@pytest.mark.parametrize("conv", ["causal_1d", "1d", "2d"])
def test_the_convolution_looks_along_the_walk(conv: str) -> None:
    grid = Grid(4, 5)
    forwards, backwards = layer(conv=conv), layer(Path(backwards=True), conv=conv)
    backwards.load_state_dict(forwards.state_dict())
    tokens = torch.randn(2, 20, 16)
    torch.testing.assert_close(backwards(tokens, grid), forwards(tokens.flip(1), grid).flip(1))


def test_a_causal_convolution_sees_no_later_patch() -> None:
    made = layer(conv="causal_1d", kernel=4)
    inner = torch.randn(1, 12, 32, requires_grad=True)
    made.convolve(inner, Grid(3, 4))[0, 6].sum().backward()
    assert inner.grad is not None
    seen = inner.grad[0].abs().sum(-1) > 0
    assert seen.nonzero().flatten().tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize(("prefix", "expected"), [(1, [6]), (2, [0, 12]), (3, [0, 6, 12])])
def test_class_tokens_are_visited_in_the_middle_at_the_ends_or_both(prefix: int, expected: list[int]) -> None:
    grid = Grid(3, 4, prefix)
    assert places(grid) == expected
    sequence = torch.arange(grid.tokens)[None, :, None]
    visit = to_visit(sequence, grid)
    order = visit.flatten().tolist()
    assert [order.index(token) - token for token in range(prefix)] == expected
    assert torch.equal(from_visit(visit, grid), sequence)


def test_widths_that_nothing_divides_still_work() -> None:
    made = layer(dim=5, expansion=1.5)  # 7 channels: one head, blocks of one
    assert made(torch.randn(1, 6, 5), Grid(2, 3)).shape == (1, 6, 5)


def test_parallel_pairs_are_two_branches_both_ways() -> None:
    choice = MIXERS.parse({"name": "mlstm", "concurrency": "parallel", "directions": "quad"})
    parts = MIXERS.builder(choice)(choice.options, 16, 2, Grid(4, 4))
    walks = [[branch.path for branch in block.branches if isinstance(branch, Mlstm)] for block in parts.blocks]
    assert walks == [[Path(), Path(backwards=True)], [Path(columns=True), Path(columns=True, backwards=True)]]


def test_fresh_gates_remember_and_their_weights_are_zero() -> None:
    made = Mlstm(16, MlstmOptions(bias=True), Path())
    assert made.forget_gate.bias.tolist() == [3.0, 4.0, 5.0, 6.0]
    assert (made.input_gate.weight == 0).all()
    assert (made.forget_gate.weight == 0).all()
    assert made.down.weight.std().item() == pytest.approx(2 / 4, rel=0.15)
    assert made.up.weight.std().item() == pytest.approx((2 / 80) ** 0.5, rel=0.15)


def test_gates_are_explained_where_their_tokens_lie() -> None:
    grid = Grid(3, 4)
    plain, turned = layer(conv="none"), layer(Path(columns=True, mirrored=True), conv="none")
    turned.load_state_dict(plain.state_dict())
    tokens = torch.randn(1, 12, 16)
    for name in ("input_gate", "forget_gate"):
        shown = plain.explain(tokens, grid)[name]
        assert shown.shape == (1, 4, 12)
        torch.testing.assert_close(turned.explain(tokens, grid)[name], shown)


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("path", SEEN)
def test_decay_is_what_the_forget_gates_behind_a_token_leave(path: Path, prefix: int) -> None:
    """Against a walk that is written out: which tokens come behind each one, class tokens in their places."""
    grid, made = Grid(3, 3, prefix), layer(path)
    shown = made.explain(torch.randn(2, grid.tokens, 16), grid)
    numbers = torch.arange(grid.tokens)[None, :, None].float()
    walked, walk = path.arrange(numbers, grid)
    order = to_visit(walked, walk).flatten().long() if prefix else walked.flatten().long()
    for step, token in enumerate(order.tolist()):
        left = shown["forget_gate"][:, :, order[step + 1 :]].prod(-1)
        torch.testing.assert_close(shown["decay"][:, :, token], left, atol=1e-6, rtol=1e-4)


def test_a_walk_backwards_keeps_the_first_patch_best() -> None:
    grid, tokens = Grid(4, 5), torch.randn(1, 20, 16)
    forwards = layer().explain(tokens, grid)["decay"]
    backwards = layer(Path(backwards=True)).explain(tokens.flip(1), grid)["decay"]
    assert (forwards.diff(dim=-1) >= 0).all()
    assert (backwards.diff(dim=-1) <= 0).all()
    torch.testing.assert_close(backwards.flip(-1), forwards)


def test_directions_have_names() -> None:
    assert [str(path) for path in paths("quad")] == [
        "rows from top left",
        "rows from bottom right",
        "columns from top left",
        "columns from bottom right",
    ]
    assert str(Path(mirrored=True)) == "rows from top right"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expansion": 0.0}, "an expansion above 0"),
        ({"heads": 0}, "heads and block of 1 or more"),
        ({"kernel": 4}, "an odd kernel for conv '2d'"),
        ({"chunk": 0}, "a chunk of 1 step or more"),
        ({"directions": "tri"}, "'uni', 'bi', 'quad', 'oct'"),
    ],
)
def test_impossible_options_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MIXERS.parse({"name": "mlstm", **options})


def test_hooks_see_what_a_layer_gave_before_it_was_used() -> None:
    mixer, tokens, grid = TestMlstm().mixer().eval(), torch.randn(1, 30, 32), Grid(6, 5)
    seen: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for recording in seen:
        handles = [
            layer.register_forward_hook(lambda _, __, out, recording=recording: seen[recording].append(out))
            for layer in (mixer.get_submodule(name) for name in ("conv", "norm", "gate"))
        ]
        with torch.set_grad_enabled(recording):
            mixer(tokens.clone(), grid)
        for handle in handles:
            handle.remove()
    assert len(seen[True]) == len(seen[False]) == 3
    for recorded, silent in zip(seen[True], seen[False], strict=True):
        torch.testing.assert_close(silent, recorded)


def test_an_empty_batch_gives_an_empty_batch() -> None:
    assert TestMlstm().mixer()(torch.empty(0, 30, 32), Grid(6, 5)).shape == (0, 30, 32)


@torch.no_grad()
def test_what_eval_mode_keeps_follows_every_change() -> None:
    kept = layer().eval()

    def check() -> None:
        """Against a layer that keeps nothing, because it is being trained."""
        fresh = layer().to(kept.down.weight.dtype)
        fresh.load_state_dict(kept.state_dict())
        tokens = torch.randn(2, 12, 16, dtype=kept.down.weight.dtype)
        torch.testing.assert_close(kept(tokens, Grid(3, 4)), fresh.train()(tokens, Grid(3, 4)))

    check()
    for part in (kept.query, kept.key, kept.value, kept.input_gate, kept.forget_gate):
        for parameter in part.parameters():
            parameter.data.add_(torch.randn_like(parameter))  # leaves no trace on the tensor
            check()
    kept.load_state_dict(layer().state_dict())
    check()
    kept.double()
    check()
    twin = copy.deepcopy(kept)
    twin.query.weight.mul_(2)
    tokens = torch.randn(2, 12, 16, dtype=torch.float64)
    assert not torch.equal(twin(tokens, Grid(3, 4)), kept(tokens, Grid(3, 4)))


def test_weights_kept_under_inference_mode_meet_gradients_later() -> None:
    kept, tokens = layer().eval().requires_grad_(False), torch.randn(2, 12, 16)
    with torch.inference_mode():
        kept(tokens, Grid(3, 4))
    kept(tokens.requires_grad_(), Grid(3, 4)).sum().backward()
    assert tokens.grad is not None


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_traces_do_not_hold_what_was_kept() -> None:
    class Alone(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = layer().eval()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.mixer(tokens, Grid(3, 4))

    model, tokens = Alone().eval(), torch.randn(2, 12, 16)
    model(tokens)
    traced: Any = torch.jit.trace(model, tokens)
    traced.mixer.query.weight.mul_(5)
    torch.testing.assert_close(traced(tokens), model(tokens))


def test_transforms_leave_what_is_kept_alone() -> None:
    kept, tokens = layer().eval().requires_grad_(False), torch.randn(2, 12, 16)
    torch.func.grad(lambda one: kept(one, Grid(3, 4)).sum())(tokens)
    with torch.no_grad():
        torch.testing.assert_close(kept(tokens, Grid(3, 4)), layer_like(kept)(tokens, Grid(3, 4)))


def layer_like(other: Mlstm) -> Mlstm:
    fresh = layer()
    fresh.load_state_dict(other.state_dict())
    return fresh
