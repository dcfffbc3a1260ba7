"""Operations that are declared once: a plain reference, an operator of PyTorch's dispatcher, and who may serve it.

`torch.ops.mixlab.<name>` has these kernels:

- CPU: the first backend that supports the call, else the reference;
- Autograd: the first backend that supports training with the call, else the reference, whose steps autograd records;
- everything else that may happen to a tensor is the reference, step by step: other devices and layouts, autocast,
  tracing, functional transforms (`vmap`, `jvp`, `grad`), gradients that travel in batches, modes that watch operators
  (counters, fake tensors, compilers, exporters) and tensors that are subclasses.

The gradient is an operator of its own, `<name>_gradient`, with the same rules; differentiated again it is the
reference. Backends live in `mixlab.engine.backends` and register themselves; without them references do all the work.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mixlab.core.compat import differentiates_forwards

Flat = Sequence[Tensor | None]
Supports = Callable[..., str | None]

# Keys in front of autograd at which somebody else follows the arithmetic, by the names that dispatch keys have since
# PyTorch 2.0.
FOLLOWED = (
    "PythonTLSSnapshot",  # modes and subclasses of tensors
    "FuncTorchDynamicLayerFrontMode",  # functional transforms
    "Batched",  # gradients that travel in batches
    "Tracer",  # torch.jit.trace
)
LIBRARY = torch.library.Library("mixlab", "FRAGMENT")


class Backend(NamedTuple):
    """Serves calls of an operator where no gradient is recorded. `supports` returns None or the reason why not."""

    name: str
    supports: Supports
    run: Callable[..., Any]


class TrainingBackend(NamedTuple):
    """Serves calls of which a gradient is wanted.

    `run` returns the output and tensors for `gradient(gradients, inputs, saved, needed, *settings)`, which returns the
    gradient of every input, or None for inputs that need none.
    """

    name: str
    supports: Supports
    run: Callable[..., tuple[Any, Sequence[Tensor]]]
    gradient: Callable[..., Flat]


OPERATORS: dict[str, "Operator"] = {}


class Operator:
    """An operation on tensors and settings. Call it like its reference, with every argument in its place.

    `inputs` and `settings` are parts of a schema of PyTorch; the last input may be a list. `gradient` is a plain form
    of the gradient, by default what autograd finds for the reference. `reads(needed, *settings)` says which inputs the
    gradient reads, by default all. Weights may be `packed` by oneDNN. With `autocasts` the reference decides what
    happens under autocast. `kernels_only`: gradients have to be such that kernels can read them.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[..., Any],
        *,
        inputs: str,
        settings: str = "",
        output: str = "Tensor",
        gradient: Callable[..., Flat] | None = None,
        reads: Callable[..., Sequence[bool]] | None = None,
        devices: Sequence[str] = ("CPU",),
        packed: bool = False,
        autocasts: bool = True,
        kernels_only: bool = True,
    ) -> None:
        self.name, self.reference = name, reference
        self.count = inputs.count(",") + 1
        self.takes_list = "[]" in inputs
        self.backends: list[Backend] = []
        self.trainers: list[TrainingBackend] = []
        self.reads, self.kernels_only = reads, kernels_only
        self.written_gradient = gradient
        followed = [*FOLLOWED, *(f"Autocast{device}" for device in devices if autocasts)]
        given = f"{inputs}, {settings}" if settings else inputs
        recorded = [f"Autograd{device}" for device in devices]
        places = [device for device in devices if device != "Meta"]  # there PyTorch wants the reference's own operators
        places += ["MkldnnCPU"] if packed else []
        recorded += ["AutogradOther"] if packed else []
        kernels = {**dict.fromkeys(places, self.compute), **dict.fromkeys(recorded, self.record)}
        self.operator = define(f"{name}({given}) -> {output}", reference, kernels, followed)
        behind = f", {settings}" if settings else ""
        schema = f"{name}_gradient(Tensor[] gradients, Tensor?[] inputs, Tensor[] saved, bool[] needed, str trainer"
        kernels = {**dict.fromkeys(places, self.compute_gradient), **dict.fromkeys(recorded, self.record_gradient)}
        self.gradient = define(f"{schema}{behind}) -> Tensor[]", self.reference_gradient, kernels, followed)
        OPERATORS[name] = self

    def __call__(self, *call: Any) -> Any:
        if torch.compiler.is_compiling():  # compilers and exporters write what they see: plain PyTorch
            return self.reference(*call)
        return self.operator(*call)

    def serve(self, backend: Backend, *, first: bool = False) -> None:
        """Add a backend after those that are there, or before them."""
        self.backends.insert(0 if first else len(self.backends), backend)

    def train(self, trainer: TrainingBackend) -> None:
        """Add a backend for training behind those that are there."""
        self.trainers.append(trainer)

    def reasons(self, *call: Any, training: bool = False) -> dict[str, str | None]:
        """Why each backend does not serve a call, by the backend's name; None for one that would."""
        table: Sequence[Backend | TrainingBackend] = self.trainers if training else self.backends
        return {backend.name: backend.supports(*call) for backend in table}

    def serves(self, *call: Any, training: bool = False) -> bool:
        """Whether a backend would serve a call of this kind."""
        return None in self.reasons(*call, training=training).values()

    # -- kernels of the dispatcher -------------------------------------------------------------------

    def compute(self, *call: Any) -> Any:
        """Return the output without a gradient."""
        for backend in self.backends:
            if backend.supports(*call) is None:
                return backend.run(*call)
        return self.reference(*call)

    def record(self, *call: Any) -> Any:
        """Return the output with its gradient, if one is wanted."""
        tensors = self.flat(call)
        if differentiates_forwards() and has_tangent(tensors):
            return self.reference(*call)
        if not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)):
            return self.compute(*call)
        for trainer in self.trainers:
            if trainer.supports(*call) is None:
                return Recorded.apply(self, trainer, call[self.count :], *tensors)
        return self.reference(*call)

    def compute_gradient(
        self, gradients: list[Tensor], inputs: Flat, saved: list[Tensor], needed: list[bool], name: str, *settings: Any
    ) -> list[Tensor]:
        """Return the gradients of the inputs that need one, by who computed the output."""
        trainer = next(trainer for trainer in self.trainers if trainer.name == name)
        if self.kernels_only and not all(is_plain(gradient) for gradient in gradients):
            return self.reference_gradient(gradients, inputs, saved, needed, name, *settings)
        return only(trainer.gradient(gradients, inputs, saved, needed, *settings), needed)

    def record_gradient(
        self, gradients: list[Tensor], inputs: Flat, saved: list[Tensor], needed: list[bool], name: str, *settings: Any
    ) -> list[Tensor]:
        """Return the gradients, to be differentiated again if a gradient is recorded now."""
        again = torch.is_grad_enabled() or (differentiates_forwards() and has_tangent([*gradients, *inputs]))
        compute = self.reference_gradient if again else self.compute_gradient
        return compute(gradients, inputs, saved, needed, name, *settings)

    def reference_gradient(
        self, gradients: list[Tensor], inputs: Flat, saved: list[Tensor], needed: list[bool], name: str, *settings: Any
    ) -> list[Tensor]:
        if self.written_gradient is not None:
            return only(self.written_gradient(gradients, inputs, needed, *settings), needed)

        def written(*tensors: Tensor | None) -> Any:
            return self.reference(*self.call(tensors, settings))

        return only(gradients_of(written, inputs, needed, gradients), needed)

    # -- arguments -----------------------------------------------------------------------------------

    def flat(self, call: Sequence[Any]) -> Flat:
        """The tensors of a call, one after the other."""
        inputs = call[: self.count]
        return (*inputs[:-1], *inputs[-1]) if self.takes_list else inputs

    def call(self, tensors: Flat, settings: Sequence[Any]) -> Sequence[Any]:
        """The inverse of `flat`."""
        if not self.takes_list:
            return (*tensors, *settings)
        return (*tensors[: self.count - 1], list(tensors[self.count - 1 :]), *settings)


class Recorded(torch.autograd.Function):
    """One call of an operator whose gradient is an operator too."""

    @staticmethod
    def forward(
        ctx: Any, operator: Operator, trainer: TrainingBackend, settings: Sequence[Any], *tensors: Tensor | None
    ) -> Any:
        output, saved = trainer.run(*operator.call(tensors, settings))
        needed = list(ctx.needs_input_grad[3:])
        reads = [True] * len(needed) if operator.reads is None else operator.reads(needed, *settings)
        ctx.operator, ctx.trainer, ctx.settings, ctx.needed = operator, trainer, settings, needed
        ctx.save_for_backward(*(x if read else None for x, read in zip(tensors, reads, strict=True)), *saved)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tensors, needed = ctx.saved_tensors, ctx.needed
        inputs, saved = tensors[: len(needed)], tensors[len(needed) :]
        found = iter(ctx.operator.gradient(gradients, inputs, saved, needed, ctx.trainer.name, *ctx.settings))
        return None, None, None, *(next(found) if need else None for need in needed)


def define(
    schema: str, reference: Callable[..., Any], kernels: dict[str, Callable[..., Any]], followed: Sequence[str]
) -> Callable[..., Any]:
    """A new operator `mixlab::...` with these kernels, which is its reference everywhere else."""
    LIBRARY.define(schema)
    name = schema.split("(")[0]
    LIBRARY.impl(name, reference, "CompositeImplicitAutograd")
    for key, kernel in kernels.items():
        LIBRARY.impl(name, kernel, key)
    for key in followed:
        LIBRARY.impl(name, reference, key)
    return getattr(torch.ops.mixlab, name).default


def is_plain(x: Tensor) -> bool:
    """Whether these are float32 numbers in the memory of a CPU, as they are read."""
    if x.dtype is not torch.float32 or not x.is_cpu or x.layout is not torch.strided or x.numel() == 0 or x.is_neg():
        return False
    return type(x) is Tensor or type(x) is torch.nn.Parameter


def why_not_plain(*tensors: Tensor | None) -> str | None:
    """None if kernels can read all of these in memory, else the reason why not."""
    if all(x is None or is_plain(x) for x in tensors):
        return None
    return "an input is not a plain tensor of float32 numbers in a CPU's memory"


def has_tangent(tensors: Flat) -> bool:
    """Whether any of these carries a derivative of forward mode."""
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def only(gradients: Flat, needed: Sequence[bool]) -> list[Tensor]:
    return [x for x, need in zip(gradients, needed, strict=True) if need and x is not None]


def gradients_of(
    function: Callable[..., Any], inputs: Flat, needed: Sequence[bool], gradients: Sequence[Tensor]
) -> list[Tensor | None]:
    """Those of function(*inputs), None for inputs that need none. Views keep them out of the history of the inputs."""
    with torch.enable_grad():
        views = [None if x is None else x.view_as(x) for x in inputs]
        out = function(*views)
    wanted: Any = [x for x, need in zip(views, needed, strict=True) if need]
    outputs = [out] if isinstance(out, Tensor) else list(out)
    found = iter(torch.autograd.grad(outputs, wanted, list(gradients), create_graph=torch.is_grad_enabled()))
    return [next(found) if need else None for need in needed]


def anywhere(gradient: Tensor) -> Tensor:
    """An input for the gradient of what is linear: it is the same everywhere."""
    return torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device, requires_grad=True)
