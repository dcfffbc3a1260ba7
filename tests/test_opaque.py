"""Compiled inference on a CPU calls blocks as one operator, which finds them by their weights."""

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mixlab
from mixlab import opaque
from mixlab.deploy import compile_blocks
from mixlab.errors import CompileError
from mixlab.grid import Grid
from mixlab.ops.linear import has_own_product

NAMES = ("convformer_pico", "coat_lite_pico", "sequencer2d_pico", "vil_pico", "hpx_former_pico")
SIDE = 32
pytestmark = pytest.mark.skipif(not has_own_product(), reason="compiled code calls kernels where there is our product")


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
    return [name.removesuffix(".default") for name in found]


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
    places = {tuple(one.data_ptr() for one in opaque.tensors_of(block) or ()) for block in model.blocks.values()}
    assert places <= opaque.KNOWN.keys()
    del model
    torch._dynamo.reset()
    gc.collect()
    assert not places & opaque.KNOWN.keys()


@torch.no_grad()
def test_weights_of_no_layer_are_refused() -> None:
    model = model_of("convformer_pico")
    block = next(iter(model.blocks.values()))
    tensors = opaque.tensors_of(block)
    assert tensors is not None
    tokens = torch.randn(2, 64, model.config.dims[0])
    torch.testing.assert_close(opaque.call_part(tokens, tensors, 8, 8, 0), block(tokens, Grid(8, 8)))
    with pytest.raises(CompileError, match="no layer"):
        opaque.call_part(tokens, [one.clone() for one in tensors], 8, 8, 0)


@torch.no_grad()
def test_tensors_and_where_they_are_kept_come_in_one_order() -> None:
    model = model_of("coat_lite_pico")
    for block in model.blocks.values():
        tensors = opaque.tensors_of(block)
        assert tensors is not None
        slots = [own[name] for own, name in opaque.slots_of(block)]
        assert list(map(id, slots)) == list(map(id, tensors))
        assert {id(one) for one in (*block.parameters(), *block.buffers())} == {id(one) for one in tensors}
