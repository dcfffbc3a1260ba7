"""A plan in the making: lowering writes steps and calls into it, and reads from it what the model has to fulfil."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from mixlab.core.compat import HOOKS
from mixlab.core.grid import Grid
from mixlab.engine.derived import derive
from mixlab.engine.plan import Call, Plan, PlannedPart, Shape, Tell, lay_out
from mixlab.engine.steps import KernelStep, PackedWeight, Pending, Place, Steps, Weights
from mixlab.engine.watch import Watch
from mixlab.models.modules import Shared

T = TypeVar("T")


class CannotLower(Exception):
    """Why a part is left to PyTorch, in words that follow "because"."""


class Tokens(NamedTuple):
    """(images, grid.tokens, channels) numbers in a place, without gaps."""

    place: Place
    images: int
    grid: Grid
    channels: int

    @property
    def rows(self) -> int:
        return self.images * self.grid.tokens

    @property
    def shape(self) -> Shape:
        return self.images, self.grid.tokens, self.channels

    @property
    def size(self) -> tuple[int, int, int]:
        """Images, rows and columns of the image tokens."""
        return self.images, self.grid.height, self.grid.width


class Bookmark(NamedTuple):
    """How far a draft is."""

    items: int
    modules: int
    others: int
    pointed: int
    values: int
    made: int
    parts: int


class Draft(Steps):
    """Steps and calls in order, and the modules and tensors that they stand for."""

    def __init__(self, root: nn.Module, names: dict[int, str], packed: dict[int, PackedWeight] | None = None) -> None:
        super().__init__(packed)
        self.root = root  # whoever calls it sees to its hooks, and it must not be kept alive
        self.names = names  # of modules, by their ids
        self.items: list[KernelStep | Call | Tell] = self.steps  # type: ignore[assignment]
        self.shapes: dict[int, Shape] = {}
        self.inputs: list[int] = []
        self.modules: list[nn.Module] = []
        self.others: list[dict[str, Any]] = []
        self.pointed: list[Tensor] = []  # tensors that steps read where they lie
        self.values: list[tuple[Tensor, Tensor]] = []  # whose numbers are part of the plan, each with a copy
        self.made: list[Any] = []  # what steps point at beside parameters
        self.parts: list[PlannedPart] = []

    # -- conditions ------------------------------------------------------------------------------

    def require(self, condition: bool, reason: str) -> None:
        """Leave the part to PyTorch unless this is so."""
        if not condition:
            raise CannotLower(reason)

    def exactly(self, module: object, *kinds: type) -> None:
        """Only modules of these very classes are known; nobody listens to them, and they are watched."""
        self.require(type(module) in kinds, f"{type(module).__name__} is not known to the engine")
        assert isinstance(module, nn.Module)
        self.watch(module)

    def watch(self, module: nn.Module) -> None:
        """A module that the plan stands for: nobody listens to it, and it stays as it is."""
        if module is self.root:
            return
        name, own = type(module).__name__, vars(module)
        self.require(not any(own[hooks] for hooks in HOOKS), f"somebody listens to a {name}")
        self.require("forward" not in own, f"a {name} has a forward of its own")
        self.require(own.get("_compiled_call_impl") is None, f"a {name} is compiled")
        self.modules.append(module)

    def watch_all(self, module: nn.Module) -> None:
        """A module and all that is inside."""
        for one in module.modules():
            self.watch(one)

    def shared(self, holder: object) -> nn.Module:
        """The module that a `Shared` hands on."""
        self.require(type(holder) is Shared, f"{type(holder).__name__} is not known to the engine")
        assert isinstance(holder, Shared)
        self.others.append(vars(holder))
        return holder.module

    def tensor(self, tensor: Tensor, *shape: int) -> Tensor:
        """A parameter or buffer that kernels can read where it lies."""
        self.require(type(tensor) in (Tensor, nn.Parameter), f"a parameter is a {type(tensor).__name__}")
        plain = tensor.dtype is torch.float32 and tensor.is_cpu and tensor.layout is torch.strided
        self.require(plain and not tensor.is_neg(), f"a parameter is {tensor.dtype} on {tensor.device}")
        self.require(tensor.is_contiguous() and tensor.numel() > 0, "a parameter is not contiguous")
        self.require(not shape or tuple(tensor.shape) == shape, f"a parameter has the shape {tuple(tensor.shape)}")
        self.pointed.append(tensor)
        return tensor

    def linear_weights(self, layer: nn.Module, into: int, out: int | None = None) -> Weights:
        """Weight and bias of a linear layer from so many channels to so many."""
        self.exactly(layer, nn.Linear)
        assert isinstance(layer, nn.Linear)
        weight, bias = layer.weight, layer.bias
        self.require(weight.ndim == 2 and weight.shape[1] == into, "a linear layer takes other channels")
        self.require(out is None or len(weight) == out, "a linear layer gives other channels")
        self.tensor(weight)
        return weight, None if bias is None else self.tensor(bias, len(weight))

    def number(self, tensor: Tensor) -> float:
        """A single number of a parameter, which becomes part of the plan."""
        self.tensor(tensor)
        self.require(tensor.numel() == 1, "a parameter is not a single number")
        self.values.append((tensor, tensor.detach().clone()))
        return tensor.item()

    def derived(self, owner: nn.Module, key: Hashable, sources: Sequence[Tensor], make: Callable[[], T]) -> T:
        """A value that is made from parameters, which are compared in every call; the plan keeps it alive."""
        for tensor in sources:
            self.tensor(tensor)
        value, copies = derive(owner, key, sources, make)
        self.values += zip(sources, copies, strict=True)
        self.made.append(value)
        return value

    # -- tensors ---------------------------------------------------------------------------------

    def given(self, shape: Shape) -> Place:
        """An input."""
        place = self.tensor_room(shape)
        self.inputs.append(place.room)
        return place

    def tensor_room(self, shape: Shape) -> Place:
        place = self.claim(0)
        self.shapes[place.room] = shape
        return place

    def as_tensor(self, place: Place | Pending, shape: Shape) -> int:
        """The room of what PyTorch shall see: it becomes a tensor of its own."""
        place = self.there(place)
        assert place.floats == 0
        known = self.shapes.setdefault(place.room, shape)
        assert known == shape
        return place.room

    def call(self, function: Callable[..., Tensor], shape: Shape, *inputs: tuple[Place | Pending, Shape]) -> Place:
        """What PyTorch makes of the inputs."""
        return self.call_for(lambda *tensors: [function(*tensors)], [shape], *inputs)[0]

    def call_for(
        self,
        function: Callable[..., Sequence[Tensor]],
        shapes: Sequence[Shape],
        *inputs: tuple[Place | Pending, Shape],
    ) -> list[Place]:
        """Several tensors that PyTorch makes of the inputs."""
        reads = tuple(self.as_tensor(place, its) for place, its in inputs)
        outputs = [self.tensor_room(shape) for shape in shapes]
        self.items.append(Call(function, reads, tuple(place.room for place in outputs)))
        return outputs

    def tell(self, name: str, tokens: Tokens) -> None:
        """Let a visitor see what there is behind a named place."""
        self.items.append(Tell(name, self.as_tensor(tokens.place, tokens.shape), tokens.grid))

    # -- parts -----------------------------------------------------------------------------------

    def mark(self) -> Bookmark:
        return Bookmark(*[len(one) for one in self.lists()])

    def lists(self) -> Sequence[list[Any]]:
        return self.items, self.modules, self.others, self.pointed, self.values, self.made, self.parts

    def rewind(self, mark: Bookmark) -> None:
        """Forget what was written since the mark."""
        for one, length in zip(self.lists(), mark, strict=True):
            del one[length:]
        written = {place.room for item in self.items if isinstance(item, KernelStep) for _, place in item.places}
        self.done = {number: place for number, place in self.done.items() if place.room in written}

    def path(self, module: object) -> str:
        return self.names.get(id(module), type(module).__name__)

    @contextmanager
    def part(self, path: str) -> Iterator[None]:
        """A part that is made of kernels: says so in the plan."""
        first = len(self.items)
        yield
        steps = tuple(item.kernel for item in self.items[first:] if isinstance(item, KernelStep))
        self.parts.append(PlannedPart(path, "", steps))

    def pytorch(self, path: str, reason: str) -> None:
        """Say that a part is left to PyTorch, and why."""
        self.parts.append(PlannedPart(path, reason))

    def close(self, outputs: Sequence[int]) -> tuple[Plan, Watch]:
        """The plan, and the watch over what it stands for."""
        return (
            lay_out(self.items, self.sizes, self.shapes, self.inputs, outputs, self.parts, self.made),
            Watch(self.modules, self.others, self.pointed, self.values, self.root),
        )
