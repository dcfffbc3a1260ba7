"""A plan: a model for one image size and batch as steps of kernels and calls of PyTorch, with all memory laid out."""

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mixlab.core.grid import Grid
from mixlab.engine.kernels import kernel_number, kernels
from mixlab.engine.memory import Life, MemoryLayout, assign
from mixlab.engine.steps import FLOAT, KernelStep, PackedWeight, Place

MOST = 2**22  # numbers of a plan's memory up to which it is kept between runs
POINTER, INT, HEAD = struct.Struct("P"), struct.Struct("i"), struct.Struct("lN")
Shape = tuple[int, ...]


class Call(NamedTuple):
    """A part that PyTorch computes: from rooms that are tensors into others."""

    function: Callable[..., Sequence[Tensor]]
    reads: tuple[int, ...]
    writes: tuple[int, ...]


class Tell(NamedTuple):
    """A place whose output somebody wants to see."""

    name: str
    room: int
    grid: Grid


class PlannedPart(NamedTuple):
    """What runs where: a part of a model by its path, and why it is not made of kernels; empty if it is."""

    path: str
    reason: str
    steps: tuple[str, ...] = ()


class Segment(NamedTuple):
    """Steps that run in one call: their text, where in it places of the common memory and of tensors belong, which
    tensors it fills, and where it says whether a weight is packed.
    """

    text: bytes
    fixed: tuple[tuple[int, int], ...]  # where in the text, how many bytes after the start of the memory
    loose: tuple[tuple[int, int, int], ...]  # where in the text, which room, how many bytes after its start
    makes: tuple[int, ...]
    packed: tuple[tuple[int, PackedWeight], ...]


class Changed(Exception):
    """A part gave something else than it promised when the plan was made."""


class Bench:
    """The memory of one run and the segments written out for it."""

    def __init__(self, plan: "Plan") -> None:
        self.memory = torch.empty(plan.memory.size, dtype=torch.float32, device="cpu")
        start = self.memory.data_ptr()
        self.texts: list[bytearray] = []
        for part in plan.items:
            text = bytearray(part.text) if isinstance(part, Segment) else bytearray()
            for where, behind in part.fixed if isinstance(part, Segment) else ():
                POINTER.pack_into(text, where, start + behind)
            self.texts.append(text)


class Plan:
    """Items in order. `shapes`: of the rooms that are tensors; `inputs` are given, `outputs` are the result."""

    def __init__(
        self,
        items: Sequence[Segment | Call | Tell],
        shapes: dict[int, Shape],
        inputs: Sequence[int],
        outputs: Sequence[int],
        memory: MemoryLayout,
        parts: Sequence[PlannedPart],
        made: Sequence[Any],
    ) -> None:
        self.made = tuple(made)  # what steps point at beside parameters
        self.items, self.shapes, self.memory, self.parts = tuple(items), shapes, memory, tuple(parts)
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.is_whole = not any(isinstance(item, Call) for item in items)
        self.benches: list[Bench] = []  # of runs that are over

    def run(self, *given: Tensor, visit: Callable[[str, Tensor, Grid], None] | None = None) -> list[Tensor]:
        """The outputs. Several threads may run a plan at once: each has memory of its own."""
        try:
            bench = self.benches.pop()
        except IndexError:
            bench = Bench(self)
        tensors = dict(zip(self.inputs, given, strict=True))
        for item, text in zip(self.items, bench.texts, strict=True):
            if isinstance(item, Segment):
                self.run_segment(item, text, tensors)
            elif isinstance(item, Call):
                self.run_call(item, tensors)
            elif visit is not None:
                visit(item.name, tensors[item.room], item.grid)
        if self.memory.size <= MOST:
            self.benches.append(bench)
        return [tensors[room] for room in self.outputs]

    def run_segment(self, segment: Segment, text: bytearray, tensors: dict[int, Tensor]) -> None:
        for room in segment.makes:
            tensors[room] = torch.empty(self.shapes[room], dtype=torch.float32, device="cpu")
        for where, room, behind in segment.loose:
            POINTER.pack_into(text, where, tensors[room].data_ptr() + behind)
        for where, packed in segment.packed:
            INT.pack_into(text, where, packed.filled)
        library = kernels()
        assert library is not None
        library.run_steps(text, is_whole=self.is_whole)
        for _, packed in segment.packed:
            packed.filled = True

    def run_call(self, call: Call, tensors: dict[int, Tensor]) -> None:
        outputs = call.function(*[tensors[room] for room in call.reads])
        for room, out in zip(call.writes, outputs, strict=True):
            plain = type(out) is Tensor and out.dtype is torch.float32 and out.is_cpu and not out.is_neg()
            if not plain or out.shape != self.shapes[room]:
                raise Changed
            tensors[room] = out if out.is_contiguous() else out.contiguous()

    def __str__(self) -> str:
        lines = [
            f"{part.path}: "
            + (f"PyTorch, because {part.reason}" if part.reason else "kernels: " + ", ".join(part.steps))
            for part in self.parts
        ]
        calls = sum(isinstance(item, Segment) for item in self.items)
        return "\n".join([*lines, f"{calls} calls of kernels, {self.memory.size * FLOAT / 1e6:.1f} MB of memory"])


def lay_out(
    items: Sequence[KernelStep | Call | Tell],
    sizes: Sequence[int],
    shapes: dict[int, Shape],
    inputs: Sequence[int],
    outputs: Sequence[int],
    parts: Sequence[PlannedPart],
    made: Sequence[Any],
) -> Plan:
    """A plan of items in order: rooms that are no tensors get places in a common memory."""
    lives: dict[int, Life] = {}
    for index, item in enumerate(items):
        for _, place in item.places if isinstance(item, KernelStep) else ():
            if place.room not in shapes:
                lives[place.room] = Life(lives.get(place.room, Life(index, index)).first, index)
    memory = assign(sizes, lives)
    segments: list[Segment | Call | Tell] = []
    known = set(inputs)
    steps: list[KernelStep] = []
    for following in [*items, None]:
        if isinstance(following, KernelStep):
            steps.append(following)
            continue
        if steps:
            segment = written(steps, memory, set(shapes), known)
            known.update(segment.makes)
            segments.append(segment)
            steps = []
        if following is not None:
            segments.append(following)
        if isinstance(following, Call):
            known.update(following.writes)
    return Plan(segments, shapes, inputs, outputs, memory, parts, made)


def written(steps: Sequence[KernelStep], memory: MemoryLayout, loose: set[int], known: set[int]) -> Segment:
    """Steps as the text that the library runs."""
    text, fixed, free = bytearray(), [], []
    packed: list[tuple[int, PackedWeight]] = []
    makes: dict[int, None] = {}
    for step in steps:
        body = bytes(step.about)
        text += HEAD.pack(kernel_number(step.kernel), len(body))
        start = len(text)
        text += body + bytes(-len(body) % 8)
        for offset, place in step.places:
            if place.room in loose:
                free.append((start + offset, place.room, FLOAT * place.floats))
                if place.room not in known:
                    makes[place.room] = None
            else:
                fixed.append((start + offset, FLOAT * (memory.starts[place.room] + place.floats)))
        packed += [(start + offset, weight) for offset, weight in step.packed]
    return Segment(bytes(text), tuple(fixed), tuple(free), tuple(makes), tuple(packed))


def describe(item: Any) -> str:
    """One item in words."""
    if isinstance(item, KernelStep):
        return item.kernel
    return f"tell {item.name}" if isinstance(item, Tell) else "PyTorch"


__all__ = ["Call", "Changed", "Place", "Plan", "PlannedPart", "Tell", "lay_out"]
