"""What every mixer must do. A new mixer's test names itself and inherits the rest."""

import copy
import pickle
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from mixlab.core.grid import Grid
from mixlab.models.layers import ACTIVATIONS
from mixlab.models.mixers import MIXERS, Mixer
from tests.models.mixers.agreement import (
    BLOCK_SIZES,
    MODEL_SIZES,
    BlockOf,
    check_inference,
    check_overflow,
    check_training,
    images_for,
    tiny_model,
    tokens_for,
)

REFERENCE = Grid(6, 5)
GRIDS = [Grid(6, 5), Grid(1, 1), Grid(3, 11), Grid(8, 2)]


class Held(nn.Module):
    """A mixer together with what it shares, as a stage holds them."""

    def __init__(self, mixer: Mixer, shared: nn.Module | None) -> None:
        super().__init__()
        self.mixer = mixer
        self.shared = shared

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        return self.mixer(tokens, grid)


class MixerContract:
    """Subclass it with `name`, and with `options` where the defaults do not show enough."""

    name: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}
    dim: ClassVar[int] = 32
    spatial: ClassVar[bool] = True  # class tokens get zero

    def held(self) -> Held:
        choice = MIXERS.parse({"name": self.name, **self.options})
        options = choice.options
        if hasattr(options, "activation"):
            options = type(options)(**{**vars(options), "activation": ACTIVATIONS.parse("gelu")})
        parts = MIXERS.builder(choice)(options, self.dim, 2, REFERENCE)
        assert len(parts.blocks) == 2
        return Held(parts.blocks[1].branches[0], parts.shared)

    def mixer(self) -> Mixer:
        return self.held().mixer

    def tokens(self, grid: Grid, batch: int = 2) -> Tensor:
        return torch.randn(batch, grid.tokens, self.dim)

    @pytest.mark.parametrize("grid", GRIDS)
    def test_keeps_the_shape_on_any_grid(self, grid: Grid) -> None:
        out = self.mixer()(self.tokens(grid), grid)
        assert out.shape == (2, grid.tokens, self.dim)
        assert out.isfinite().all()

    def test_handles_class_tokens(self) -> None:
        grid = Grid(6, 5, prefix=2)
        tokens, mixer = self.tokens(grid), self.mixer().eval()
        out = mixer(tokens.clone(), grid)
        assert out.shape == tokens.shape
        if self.spatial:
            assert (out[:, :2] == 0).all()
            without = mixer(tokens[:, 2:].clone(), Grid(6, 5))
            torch.testing.assert_close(out[:, 2:], without)

    def test_images_do_not_see_each_other(self) -> None:
        tokens, mixer = self.tokens(REFERENCE, batch=3), self.mixer().eval()
        together = mixer(tokens.clone(), REFERENCE)
        alone = torch.cat([mixer(one[None].clone(), REFERENCE) for one in tokens])
        torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)

    def test_gradients_are_right(self) -> None:
        grid = Grid(3, 2)
        mixer = self.held().double()
        tokens = self.tokens(grid, batch=1).double().requires_grad_()
        weights = torch.randn(1, grid.tokens, self.dim, dtype=torch.float64)
        (gradient,) = torch.autograd.grad((mixer(tokens, grid) * weights).sum(), tokens)
        step = torch.randn_like(tokens) * 1e-5
        with torch.no_grad():
            change = ((mixer(tokens + step, grid) - mixer(tokens - step, grid)) * weights).sum() / 2
        torch.testing.assert_close((gradient * step).sum(), change, rtol=1e-4, atol=1e-9)

    def test_copies_and_reloads(self) -> None:
        mixer, tokens = self.held().eval(), self.tokens(REFERENCE)
        expected = mixer(tokens.clone(), REFERENCE)
        other = self.held().eval()
        other.load_state_dict(mixer.state_dict())
        for twin in (copy.deepcopy(mixer), pickle.loads(pickle.dumps(mixer)), other):
            torch.testing.assert_close(twin(tokens.clone(), REFERENCE), expected)

    def test_explains_what_it_declares(self) -> None:
        mixer = self.mixer()
        assert tuple(mixer.explain(self.tokens(REFERENCE), REFERENCE)) == mixer.explains

    def test_runs_under_autocast(self) -> None:
        tokens, mixer = self.tokens(REFERENCE), self.mixer()
        expected = mixer(tokens.clone(), REFERENCE)
        with torch.autocast("cpu", torch.float16):
            out = mixer(tokens.clone(), REFERENCE)
        torch.testing.assert_close(out.float(), expected, atol=0.02, rtol=0.02)

    def test_gradients_flow_in_eval_mode(self) -> None:
        tokens = self.tokens(REFERENCE).requires_grad_()
        self.mixer().eval()(tokens * 1, REFERENCE).square().sum().backward()
        assert tokens.grad is not None
        assert tokens.grad.abs().sum() > 0

    @pytest.mark.parametrize(("images", "grid"), BLOCK_SIZES)
    def test_a_block_agrees_with_double_precision(self, images: int, grid: Grid) -> None:
        block = BlockOf(tiny_model(self.name, self.options, dim=self.dim), grid)
        tokens = tokens_for(images, grid, self.dim)
        check_inference(block, tokens)
        check_training(block, tokens)

    @pytest.mark.parametrize(("images", "grid"), [(2, Grid(6, 5)), (2, Grid(19, 17))])
    def test_overflow_in_a_block_ends_as_without_kernels(self, images: int, grid: Grid) -> None:
        if self.dim % 16:
            pytest.skip("PyTorch's norm of a width that vectors do not divide overflows otherwise than its others")
        check_overflow(
            BlockOf(tiny_model(self.name, self.options, dim=self.dim), grid), tokens_for(images, grid, self.dim)
        )

    @pytest.mark.parametrize(("images", "height", "width", "class_tokens"), MODEL_SIZES)
    def test_a_model_agrees_with_double_precision(
        self, images: int, height: int, width: int, class_tokens: int
    ) -> None:
        model = tiny_model(self.name, self.options, dim=self.dim, class_tokens=class_tokens)
        check_inference(model, images_for(images, height, width))
        check_training(model, images_for(images, height, width))
