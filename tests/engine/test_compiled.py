"""Compiled inference on a CPU calls blocks as one operator, which finds them by their weights."""

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mixlab
from mixlab.core.errors import CompileError
from mixlab.core.grid import Grid
from mixlab.core.parts import PARTS
from mixlab.deploy import compile_blocks
from mixlab.engine import compiled as engine_compiled
from mixlab.engine.kernels import has_wide_vectors
from mixlab.models.backbone import Block
from mixlab.models.layers import Branch, Mlp, StarReLU
from mixlab.models.mixers import Mixer

NAMES = ("convformer_pico", "coat_lite_pico", "sequencer2d_pico", "vil_pico", "hpx_former_pico")
SIDE = 32
pytestmark = pytest.mark.skipif(not has_wide_vectors(), reason="compiled code calls kernels where there is our product")


def model_of(name: str, **words: Any) -> mixlab.Backbone:
    torch.manual_seed(0)
    model = mixlab.create_model(name, image_size=SIDE, **words).eval()
    nn.init.normal_(model.get_parameter("head.classifier.weight"), std=0.02)
    return model


def nodes_of(part: nn.Module, *inputs: Any) -> list[str]:
    """The operators of all graphs that a call compiles."""
    found: list[str] = []

    def keep(graph: Any, inputs: object) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch._dynamo.reset()
    torch.compile(part, backend=keep)(*inputs)
    return [name.removesuffix(".default") for name in found if "functorch" not in name]  # a question


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_one_operator_each_and_give_what_they_give(name: str) -> None:
    model, image = model_of(name), torch.randn(2, 3, SIDE, SIDE)
    wanted = model(image)
    block, grid = next(iter(model.blocks.values())), model.reference_grids[0]
    assert nodes_of(block, torch.randn(2, grid.tokens, model.config.dims[0]), grid) == ["mixlab.part"]
    torch._dynamo.reset()
    blocks = compile_blocks(copy.deepcopy(model), backend="aot_eager")
    assert torch.equal(blocks(image), wanted)
    other = torch.randn(3, 3, SIDE, SIDE + 16)
    assert torch.equal(blocks(other), model(other))


@torch.no_grad()
def test_blocks_of_a_kind_share_a_graph_and_keep_their_weights_apart() -> None:
    model = model_of("convformer_pico", depths=[1, 3, 1, 1])
    for number, parameter in enumerate(model.parameters()):
        parameter.add_(0.01 * (number % 7))
    image = torch.randn(2, 3, SIDE, SIDE)
    wanted = model(image)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert torch.equal(compile_blocks(model, backend="aot_eager")(image), wanted)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4


@torch.no_grad()
def test_weights_may_change_in_place_by_assignment_and_by_moving() -> None:
    model, image = model_of("hpx_former_pico"), torch.randn(2, 3, SIDE, SIDE)
    plain = copy.deepcopy(model)
    torch._dynamo.reset()
    fast = compile_blocks(model, backend="aot_eager")
    fast(image)
    for one in (model, plain):
        for parameter in one.parameters():
            parameter.mul_(1.1)
    assert torch.equal(fast(image), plain(image))
    other = {name: 0.9 * value for name, value in plain.state_dict().items()}
    plain.load_state_dict(other)
    model.load_state_dict({name: value.clone() for name, value in other.items()}, assign=True)
    assert torch.equal(fast(image), plain(image))
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert torch.equal(fast(image), plain(image))


@torch.no_grad()
def test_listeners_inside_a_block_hear_every_call() -> None:
    model, image = model_of("convformer_pico"), torch.randn(2, 3, SIDE, SIDE)
    heard: list[int] = []
    layer = next(module for module in model.modules() if isinstance(module, nn.Linear))
    layer.register_forward_hook(lambda *_: heard.append(1))
    torch._dynamo.reset()
    fast = compile_blocks(model, backend="aot_eager")
    for _ in range(3):
        fast(image)
    assert len(heard) == 3


def test_gradients_training_halves_and_stand_ins_are_compiled_themselves() -> None:
    model = model_of("convformer_pico")
    block, grid = next(iter(model.blocks.values())), Grid(8, 8)
    tokens = torch.randn(2, 64, model.config.dims[0])

    def has_part(block: nn.Module, tokens: Tensor) -> bool:
        return "mixlab.part" in nodes_of(block, tokens, grid)

    assert not has_part(block, tokens)
    with torch.no_grad():
        assert has_part(block, tokens)
        assert not has_part(copy.deepcopy(block).train(), tokens)
        assert not has_part(copy.deepcopy(block).double(), tokens.double())
        with torch.autocast("cpu", torch.float16):
            assert not has_part(block, tokens)
        others = {name: 1.05 * value for name, value in block.named_parameters()}
        called = torch.compile(
            lambda tokens: torch.func.functional_call(block, others, (tokens, grid)), backend="aot_eager"
        )
        torch.testing.assert_close(called(tokens), torch.func.functional_call(block, others, (tokens, grid)))
        program = torch.export.export(block, (tokens, grid))
        assert not any("mixlab" in str(node.target) for node in program.graph.nodes)


@torch.no_grad()
def test_parallel_blocks_of_several_scales() -> None:
    small: dict[str, Any] = {"dims": [16, 16, 16, 16], "depths": [1, 1, 1, 1], "mlp_ratio": [2, 2, 2, 2]}
    model, image = model_of("coat_tiny", **small), torch.randn(2, 3, SIDE, SIDE)
    wanted = model(image)
    torch._dynamo.reset()
    torch.testing.assert_close(compile_blocks(model, backend="aot_eager")(image), wanted)


@torch.no_grad()
def test_nothing_of_a_model_stays_behind_it() -> None:
    model, image = model_of("convformer_pico"), torch.randn(2, 3, SIDE, SIDE)
    torch._dynamo.reset()
    compile_blocks(model, backend="aot_eager")(image)
    numbers = [number for number, part in PARTS.items() if part in set(model.modules())]
    left = [weakref.ref(parameter) for parameter in model.parameters()]
    assert len(numbers) > len(model.blocks)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert not any(number in PARTS for number in numbers)
    assert not any(one() is not None for one in left)


def first_block(name: str = "convformer_pico") -> tuple[Block, Tensor, Grid]:
    model = model_of(name)
    block = next(iter(model.blocks.values()))
    assert isinstance(block, Block)
    return block, torch.randn(2, 64, model.config.dims[0]), Grid(8, 8)


def compiled(part: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(part, backend="aot_eager")


@torch.no_grad()
def test_copies_are_found_by_numbers_of_their_own() -> None:
    block, tokens, grid = first_block()
    for other in (copy.deepcopy(block), copy.copy(block), pickle.loads(pickle.dumps(block))):
        assert int(other.number) != int(block.number)
        assert PARTS[int(other.number)] is other
    twin = copy.deepcopy(block)
    for parameter in twin.parameters():
        parameter.mul_(1.2)
    torch.testing.assert_close(compiled(twin)(tokens, grid), twin(tokens, grid), rtol=0, atol=0)


@torch.no_grad()
def test_other_forwards_are_applied_once() -> None:
    class Twice(Branch):
        def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
            return 2 * super().forward(tokens, grid)

    torch.manual_seed(0)
    tokens, grid = torch.randn(2, 64, 32), Grid(8, 8)
    twice = Twice(nn.LayerNorm(32), Mlp(32, 64, StarReLU(0.9, -0.4, True, True), bias=True)).eval()
    torch.testing.assert_close(compiled(twice)(tokens, grid), twice(tokens, grid))
    block, tokens, grid = first_block()
    wanted, before = block(tokens, grid), block.forward
    block.forward = lambda tokens, grid: before(tokens, grid) + 1  # type: ignore[method-assign]
    torch.testing.assert_close(compiled(block)(tokens, grid), wanted + 1)


@torch.no_grad()
def test_parts_with_the_same_weights_stay_apart() -> None:
    torch.manual_seed(0)
    tokens, grid = torch.randn(2, 64, 32), Grid(8, 8)
    mlp = Mlp(32, 64, StarReLU(0.9, -0.4, True, True), bias=True)
    norms = [nn.LayerNorm(32, elementwise_affine=False, eps=eps) for eps in (1e-6, 1.0)]
    parts = [mlp.eval(), *(Branch(norm, mlp).eval() for norm in norms)]
    for part in parts:
        assert "mixlab.part" in nodes_of(part, tokens, grid)
        torch.testing.assert_close(compiled(part)(tokens, grid), part(tokens, grid), rtol=0, atol=0)


@torch.no_grad()
def test_parts_that_change_places_are_seen() -> None:
    model = model_of("convformer_pico", depths=[1, 3, 1, 1])
    image, (_, one, other, *_) = torch.randn(1, 3, SIDE, SIDE), list(model.blocks.values())
    for parameter in other.parameters():
        parameter.mul_(1.3)
    torch._dynamo.reset()
    fast = compile_blocks(model, backend="aot_eager")
    before = fast(image)
    one.token, other.token = other.token, one.token
    after = fast(image)
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, copy.deepcopy(model)(image), rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("kind", [Tensor, nn.Parameter])
@pytest.mark.parametrize("name", ["convformer_pico", "coat_lite_pico"])
def test_other_weights_for_a_call_are_used(name: str, kind: type) -> None:
    """Also those of layers that blocks share."""
    model, image = model_of(name, depths=[1, 1, 1, 1]), torch.randn(2, 3, SIDE, SIDE)
    others = {name: 1.5 * value for name, value in model.named_parameters() if "stages.0" in name}
    if kind is nn.Parameter:
        others = {name: nn.Parameter(value) for name, value in others.items()}
    wanted = torch.func.functional_call(model, others, (image,))
    called = compiled(lambda image: torch.func.functional_call(model, others, (image,)))
    torch.testing.assert_close(called(image), wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(image), wanted, rtol=1e-3)


@torch.no_grad()
def test_weights_that_compiled_code_changes_itself_are_used() -> None:
    block, tokens, grid = first_block()
    twin = copy.deepcopy(block)

    def step(tokens: Tensor) -> Tensor:
        for parameter in block.parameters():
            parameter.mul_(1.1)
        found: Tensor = block(tokens, grid)
        return found

    for parameter in twin.parameters():
        parameter.mul_(1.1)
    torch.testing.assert_close(compiled(step)(tokens), twin(tokens, grid))


@torch.no_grad()
def test_weights_as_constants_of_the_graph() -> None:
    block, tokens, grid = first_block()
    block.requires_grad_(False)
    torch._dynamo.reset()
    wanted = block(tokens, grid)
    with torch._inductor.config.patch(freezing=True):
        assert "mixlab.part" not in nodes_of(block, tokens, grid)
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(block)(tokens, grid), wanted, rtol=1e-4, atol=1e-5)
    for _ in range(2):  # the second with numbers of its own
        block, _, _ = first_block()
        block.requires_grad_(False)
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(block, options={"freezing": True})(tokens, grid), wanted)


@torch.no_grad()
def test_forward_gradients_are_not_lost() -> None:
    block, tokens, grid = first_block()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(tokens, torch.ones_like(tokens))
        assert torch.autograd.forward_ad.unpack_dual(compiled(block)(dual, grid)).tangent is not None


@torch.no_grad()
def test_mixers_that_do_not_ask_for_it_are_compiled() -> None:
    class Own(Mixer):
        def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
            return tokens.flip(1)

    block, tokens, grid = first_block()
    assert all(mixer.outruns_compilers for mixer in block.mixers)
    block.token.branches[0].mixer = Own()
    nodes = nodes_of(block, tokens, grid)
    assert nodes.count("mixlab.part") == 1  # its MLP
    assert len(nodes) > 1
    torch.testing.assert_close(compiled(block)(tokens, grid), block(tokens, grid))


@torch.no_grad()
def test_a_part_that_gives_what_it_is_given() -> None:
    class Same(nn.Module):
        def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
            return grid.from_map(grid.to_map(tokens))

    part, tokens, grid = Branch(nn.Identity(), Same()).eval(), torch.randn(2, 64, 32), Grid(8, 8)
    out = compiled(part)(tokens, grid)
    assert torch.equal(out, tokens)
    assert out.data_ptr() != tokens.data_ptr()


def test_a_block_that_is_gone_is_told() -> None:
    with pytest.raises(CompileError, match="no longer there"):
        engine_compiled.call_part(torch.randn(2, 64, 32), torch.tensor(-1), [], 8, 8, 0)
