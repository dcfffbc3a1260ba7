"""Blocks and tiny models beside themselves in double precision, by every route that inference and training may take."""

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mixlab.core.grid import Grid
from mixlab.core.hooks import is_silent, without_engine
from mixlab.engine.serve import serve_part
from mixlab.models.backbone import Backbone
from mixlab.models.build import build
from mixlab.models.config import ModelConfig

# Images and the grid of each: few tokens and many, sides that no vector divides, class tokens.
BLOCK_SIZES = [
    (1, Grid(6, 5)),
    (3, Grid(7, 3)),
    (1, Grid(1, 1)),
    (3, Grid(5, 9, prefix=2)),
    (1, Grid(9, 4, prefix=1)),
    (1, Grid(21, 29)),
]
MODEL_SIZES = [(1, 33, 47, 0), (3, 64, 40, 0), (3, 41, 32, 1)]  # images, height, width, class tokens
PRECISION = 5e-6  # of the largest value: what float32 loses in a block or a model this small
GRADIENT_PRECISION = 2e-4
SMALL = 0.05  # of the largest gradient: gradients below it are sums that nearly cancel, and lose more


def tiny_model(
    name: str, options: Mapping[str, Any], *, dim: int = 32, class_tokens: int = 0, **changes: Any
) -> Backbone:
    """Two stages of two blocks with this mixer, every parameter away from the 0 or 1 that it starts from."""
    description = {
        "name": f"tiny_{name}",
        "family": "tiny",
        "dims": [dim, 40],
        "depths": [2, 2],
        "mixers": {"name": name, **options},
        "mlp_ratio": 3,
        "branch_scale": [{"name": "layer_scale", "branch": 0.7}, {"name": "res_scale", "residual": 0.9}],
        "activation": "star_relu" if class_tokens else "gelu",
        "class_tokens": class_tokens,
        "image_size": 40,
        "stem": {"name": "patchify", "patch": 4},
        "num_classes": 7,
        **changes,
    }
    generator = torch.Generator().manual_seed(1)
    model = build(ModelConfig.parse(description))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


class BlockOf(nn.Module):
    """The second block of a model's first stage, as a function of its tokens; by the engine where it serves."""

    def __init__(self, model: Backbone, grid: Grid) -> None:
        super().__init__()
        self.model, self.grid = model, grid

    def forward(self, tokens: Tensor) -> Tensor:
        block = self.model.stages[0].blocks[1]
        served = None if is_silent() else serve_part(block, tokens, self.grid)
        output: Tensor = block(tokens, self.grid) if served is None else served
        return output


ENGINES: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "engine on": contextlib.nullcontext,
    "engine off": without_engine,
}


def check_inference(function: nn.Module, given: Tensor) -> None:
    """Raise unless the output in inference mode is that of double precision, with the engine and without."""
    function.eval()
    with torch.inference_mode():
        expected = copy.deepcopy(function).double()(given.double())
        for engine, context in ENGINES.items():
            for call in ("first call", "second call"):  # the second finds what the first one prepared
                with context():
                    assert_near(function(given), expected, PRECISION, f"inference, {engine}, {call}")


class Watched(TorchDispatchMode):
    """Leaves every operator to PyTorch, because somebody watches it."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def check_overflow(function: nn.Module, given: Tensor) -> None:
    """Raise unless numbers, infinities and what is no number lie where they do without kernels, if the first image is
    too bright for float32.
    """
    function.eval()
    bright = given.clone()
    bright[0] *= 1e25
    with torch.inference_mode():
        with Watched():
            expected = kinds(function(bright))
        for engine, context in ENGINES.items():
            with context():
                assert torch.equal(kinds(function(bright)), expected), engine


def kinds(values: Tensor) -> Tensor:
    """0 for numbers, 1 and 2 for infinities below and above 0, 3 for what is no number."""
    return torch.where(values.isnan(), 3, values.isposinf() * 2 + values.isneginf() * 1)


def check_training(function: nn.Module, given: Tensor) -> None:
    """Raise unless output and gradients in training are those of double precision, with the engine and without."""
    function.train()
    expected = output_and_gradients(copy.deepcopy(function).double(), given.double())
    for engine, context in ENGINES.items():
        with context():
            computed = output_and_gradients(function, given)
        assert computed.keys() == expected.keys()
        assert_near(computed.pop("output"), expected["output"], PRECISION, f"training, {engine}, output")
        floor = SMALL * max(float(gradient.abs().max()) for name, gradient in expected.items() if name != "output")
        for name, gradient in computed.items():
            route = f"training, {engine}, gradient of {name}"
            assert_near(gradient, expected[name], GRADIENT_PRECISION, route, floor)


def output_and_gradients(function: nn.Module, given: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of a weighted sum of it: of the input and of every parameter that it depends on."""
    given = given.clone().requires_grad_()
    output = function(given)
    weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).mul(7).cos().view_as(output)
    learned = {name: parameter for name, parameter in function.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad(
        (output * weights.to(output.dtype)).sum(), [given, *learned.values()], allow_unused=True
    )
    names = ["input", *learned]
    known = {name: gradient for name, gradient in zip(names, gradients, strict=True) if gradient is not None}
    return {"output": output.detach(), **known}


def assert_near(computed: Tensor, expected: Tensor, precision: float, route: str, floor: float = 0.0) -> None:
    assert computed.shape == expected.shape, route
    largest = float(expected.abs().max())
    error = float((computed.double() - expected).abs().max())
    message = f"{route}: off by {error:.2g} where the largest value is {largest:.2g}"
    assert error <= precision * max(largest, floor), message


def tokens_for(images: int, grid: Grid, dim: int) -> Tensor:
    return torch.randn(images, grid.tokens, dim, generator=torch.Generator().manual_seed(2))


def images_for(images: int, height: int, width: int) -> Tensor:
    return torch.randn(images, 3, height, width, generator=torch.Generator().manual_seed(3))


def has_plans(model: Backbone) -> bool:
    """Whether token mixing in this model is made of kernels."""
    report = model.engine_report(images_for(1, 33, 47))
    return any(not part.reason for part in report.parts if part.path.endswith(".token"))
