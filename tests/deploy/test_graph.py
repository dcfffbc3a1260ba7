"""Graphs hold constants where the model computes from parameters alone, and never a complex number."""

import pytest
import torch
from torch import Tensor, nn

import mixlab
from mixlab.core.errors import ExportError
from mixlab.deploy.graph import capture, check_real, fixed_copy, fold_constants, trace
from mixlab.models.fixed_filter import FixedConv
from mixlab.models.mixers.hyena import LongConv
from mixlab.ops.mlstm import running_max


class Folds(nn.Module):
    """A product of two parameters, a table that is written into, and a view."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        table = torch.zeros(4)
        table[1:] += 2.0
        return x @ (self.left @ self.right).T + table + self.left[0]


class Spectral(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * 2)


class RunningMax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return running_max(x)


def test_what_follows_from_parameters_alone_is_computed_once() -> None:
    model, x = Folds().requires_grad_(False), torch.randn(2, 4)
    folded = fold_constants(capture(model, x, dynamic=True).module(check_guards=False))
    products = [node for node in folded.graph.nodes if "matmul" in str(node.target)]
    assert len(products) == 1
    assert "right" not in dict(folded.named_parameters())
    y = torch.randn(5, 4)
    torch.testing.assert_close(folded(y), model(y))


def test_complex_numbers_are_refused() -> None:
    with pytest.raises(ExportError, match="complex numbers"):
        check_real(capture(Spectral(), torch.randn(2, 8), dynamic=True))


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 64, 65])
def test_a_running_maximum_is_traced_without_an_operator_of_its_own(steps: int) -> None:
    program = capture(RunningMax(), torch.randn(2, steps), dynamic=True)
    assert not any("cummax" in str(node.target) for node in program.graph.nodes)
    x = torch.randn(5, steps)
    torch.testing.assert_close(program.module()(x), x.cummax(-1).values)


def test_a_recurrent_layer_stays_one_operator() -> None:
    model = mixlab.create_model("sequencer2d_pico", dims=[8] * 4, depths=[1] * 4)
    program = trace(model, torch.randn(2, 3, 32, 32), dynamic=True)
    assert sum(node.target is torch.ops.aten.lstm.input for node in program.graph.nodes) == 8


def test_the_model_itself_is_left_as_it_was() -> None:
    model = mixlab.create_model("hpx_former_pico", dims=[8] * 4, depths=[1] * 4).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fixed = fixed_copy(model, torch.randn(1, 3, 32, 32))
    assert model.training
    assert all(parameter.requires_grad for name, parameter in model.named_parameters() if "distance" not in name)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert sum(isinstance(module, FixedConv) for module in fixed.modules()) == 4
    assert not any(isinstance(module, LongConv) for module in fixed.modules())
