"""Kernels that follow each other in one call: with small maps, what lies between calls costs more than they do.

What a step needs is written down once for tensors of one size; a call fills in where the tensors lie. Weights are
pointed at, so whoever keeps steps sees to it that these stay where they are.
"""

import ctypes
import itertools
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mixlab.core.grid import Grid
from mixlab.engine.kernels import activation_number, kernel_number, kernels, pointer
from mixlab.engine.kernels.attention import AttentionAbout
from mixlab.engine.kernels.depthwise import DepthwiseAbout
from mixlab.engine.kernels.factor import FactorAbout, contexts_of
from mixlab.engine.kernels.linear import AS_IT_IS, FEW, PANEL, LinearAbout, MlpAbout, Then, room_for
from mixlab.engine.kernels.longconv import Kernel
from mixlab.engine.kernels.mlstm import MlstmAbout, Packed, chunk_for
from mixlab.engine.kernels.norm import Norm, NormAbout
from mixlab.engine.kernels.pool import PoolAbout

Weights = tuple[Tensor, Tensor | None]
FLOAT = 4
POINTER, INT = struct.Struct("P"), struct.Struct("i")
JOINED = 288  # rows per thread from which its tasks do a layer's norm: with fewer, several would do the same
LINE = 64  # bytes that rooms begin at multiples of
MOST = 2**22  # numbers in all rooms up to which they are one tensor: larger ones would not be kept when they are freed


class Place(NamedTuple):
    """So many bytes behind the start of the input (0), of the output (1), of the stream that this is added to (2),
    or of a room for something in between (3 and on).
    """

    base: int
    bytes: int = 0

    def at(self, floats: int) -> "Place":
        return Place(self.base, self.bytes + FLOAT * floats)


GIVEN, OUT, STREAM = Place(0), Place(1), Place(2)
ROOMS = 3


class Sum(NamedTuple):
    """A residual sum: residual * tokens + branch * update, 1 where there is no factor."""

    residual: Tensor | None = None
    branch: Tensor | None = None


class Cell(NamedTuple):
    """An mLSTM cell with the norm, the skip and the way of walking that `run_mlstm` takes."""

    packed: Packed
    norm: Norm
    skip: Tensor
    eps: float
    chunk: int | None
    backwards: bool


class Product(NamedTuple):
    """Which thirds of the channels are multiplied behind a convolution, and which one is put aside; a norm of the
    product without a bias.
    """

    parts: tuple[int, int, int]
    norm: Norm
    aside: Place


class Kept:
    """A packed weight that stays, once a call has filled it."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.room, self.filled = weight, room_for(weight), False
        self.place, self.shape = weight.data_ptr(), weight.shape

    def is_of(self, weight: Tensor) -> bool:
        return self.weight is weight and self.place == weight.data_ptr() and self.shape == weight.shape


class Keeper:
    """Packed weights of a layer that no longer change, by the weights. Copies of a layer and files start with none."""

    def __init__(self) -> None:
        self.known: dict[int, Kept] = {}

    def of(self, weight: Tensor) -> Kept:
        kept = self.known.get(id(weight))
        if kept is None or not kept.is_of(weight):  # it lies elsewhere now
            kept = self.known[id(weight)] = Kept(weight)
        return kept

    def __deepcopy__(self, memo: object) -> "Keeper":
        return Keeper()

    def __reduce__(self) -> tuple[Any, ...]:
        return Keeper, ()


class Steps:
    """Steps over rows of channels; `threads` is how many may work at once. With a `keeper` weights are packed once."""

    def __init__(self, rows: int, keeper: Keeper | None = None) -> None:
        self.rows, self.threads, self.keeper = rows, torch.get_num_threads(), keeper
        self.text = bytearray()
        self.rooms: list[int] = []  # their sizes
        self.places: list[tuple[int, int, int]] = []  # where in the text, of which base, how many bytes behind it
        self.packed: list[tuple[int, int]] = []  # where in the text, how many floats before it in their common room
        self.packed_floats = 0
        self.kept: list[tuple[int, Kept]] = []  # where in the text it says whether that is filled
        self.norms: list[tuple[Norm, Place]] = []  # that are done where they are asked for
        self.normed: dict[int, Place] = {}  # of these, what has been written down as a step
        self.starts: list[int] = []  # of the rooms in their common one, and its end

    # -- what is done ----------------------------------------------------------------------------

    def room(self, channels: int) -> Place:
        """Room for rows of so many channels."""
        return self.claim(self.rows * channels)

    def claim(self, floats: int) -> Place:
        self.rooms.append(-(-floats * FLOAT // LINE) * LINE // FLOAT)
        return Place(ROOMS + len(self.rooms) - 1)

    def norm(self, norm: Norm, x: Place) -> Place:
        """x behind a norm: part of the linear layers that read it if there are many rows, else a step of its own. x has
        to stay as it is until it is read.
        """
        self.norms.append((norm, x))
        return Place(-len(self.norms))

    def there(self, place: Place) -> Place:
        """The same, or the room that a norm is written into."""
        if place.base >= 0:
            return place
        if place.base not in self.normed:
            norm, x = self.norms[-place.base - 1]
            assert norm.weight is not None
            width = len(norm.weight)
            self.normed[place.base] = self.room(width)
            weights = {"weight": pointer(norm.weight), "bias": pointer(norm.bias)}
            sizes = {"one_row": width, "rows": self.rows, "width": width, "threads": self.threads}
            self.add("norm", NormAbout(**weights, **sizes, eps=norm.eps), one=x, out=self.normed[place.base])
        return self.normed[place.base].at(place.bytes // FLOAT)

    def join(self, about: ctypes.Structure, x: Place, least: int) -> Place:
        """What a linear layer reads, with a norm in front of it as the layer's own from so many rows on."""
        if x.base >= 0 or x.bytes or self.rows < least:
            return self.there(x)
        norm, source = self.norms[-x.base - 1]
        assert norm.weight is not None
        assert len(norm.weight) == about.depth
        about.norm, about.norm_bias, about.eps = pointer(norm.weight), pointer(norm.bias), norm.eps
        return source

    def linear(
        self,
        weights: Weights,
        x: Place,
        out: Place,
        after: str = "none",
        then: Then = AS_IT_IS,
        onto: Sum | None = None,
    ) -> None:
        """f(x W^T + b), or the sum of the stream and that."""
        about = self.describe(weights, after, then, onto)
        places = {"left": self.join(about, x, max(FEW + 1, JOINED * self.threads)), "out": out}
        if onto is not None:
            places["beside"] = STREAM
        start = self.add("linear", about, **places)
        if self.rows > FEW or self.keeper is not None:
            self.pack(start, weights)

    def mlp(self, first: Weights, second: Weights, x: Place, out: Place, after: str, then: Then, onto: Sum) -> None:
        """Two linear layers, what lies between them in the cache."""
        about = MlpAbout(self.describe(first, after, then, None), self.describe(second, "none", AS_IT_IS, onto), 0)
        x = self.join(about.first, x, 0)
        start = self.add("mlp", about)
        behind = start + MlpAbout.second.offset
        for offset, name, place in ((start, "left", x), (behind, "out", out), (behind, "beside", STREAM)):
            self.point(offset + getattr(LinearAbout, name).offset, place)
        self.pack(behind, second, self.pack(start, first))

    def depthwise(
        self,
        weights: Weights,
        size: tuple[int, int, int],
        padding: tuple[int, int],
        x: Place,
        out: Place,
        after: str = "none",
        *,
        turned: bool = False,
        product: Product | None = None,
        strides: tuple[int, int, int, int] | None = None,
    ) -> None:
        """Kernels (C, 1, h, w) over images, rows and columns; `product`: see `convolve_and_multiply`. `strides`: from a
        pixel and an image to the next of `x` and `out`, if they do not lie one behind the other.
        """
        (weight, bias), (images, height, width) = weights, size
        seen, _, high, wide = weight.shape
        above, before = (high - 1 - padding[0], wide - 1 - padding[1]) if turned else padding
        channels = seen if product is None else seen // 3
        row, image, out_row, out_image = strides or (seen, height * width * seen, channels, height * width * channels)
        parts = (0, -1, -1) if product is None else tuple(channels * part for part in product.parts)
        about = DepthwiseAbout(
            weight=pointer(weight),
            bias=pointer(bias),
            norm=None if product is None else pointer(product.norm.weight),
            row=row,
            image=image,
            out_row=out_row,
            out_image=out_image,
            part=(ctypes.c_int * 3)(*parts),
            images=images,
            height=height,
            width=width,
            channels=channels,
            high=high,
            wide=wide,
            above=above,
            before=before,
            turned=turned,
            after=activation_number(after),
            threads=self.threads,
            eps=0 if product is None else product.norm.eps,
        )
        places = {"x": x, "out": out}
        if product is not None:
            places["aside"] = product.aside
        self.add("depthwise", about, **places)

    def long_conv(
        self, kernel: Kernel, prepared: Tensor, size: tuple[int, int, int], x: Place, factor: Place, out: Place
    ) -> None:
        """See `convolve_maps`: with a spectrum, or with taps as they are."""
        images, height, width = size
        name = "taps" if prepared.ndim > 1 else "spectrum"
        sizes = {"images": images, "height": height, "width": width, "factor_row": kernel.channels}
        about = kernel.about(**{name: pointer(prepared)}, **sizes)
        self.add("longconv", about, x=x, factor=factor, out=out)

    def attention(self, heads: int, images: int, channels: int, x: Place, out: Place) -> None:
        """See `run_attention`."""
        width, row, tokens = channels // heads, 3 * channels, self.rows // images
        sizes = {"tokens": tokens, "images": images, "heads": heads, "width": width, "threads": self.threads}
        about = AttentionAbout(image=tokens * row, row=row, scale=width**-0.5, parts=1, **sizes)
        self.add("attention", about, qkv=x, out=out)

    def windows(self, windows: Sequence[Weights], images: int, grid: Grid, channels: int, x: Place) -> Place:
        """Kernels (C, 1, h, w) over consecutive channels of the last third of (B, N, 3 C): what they see of images."""
        row, near = 3 * channels, self.claim(images * grid.image_tokens * channels)
        strides = (row, grid.tokens * row, channels, grid.image_tokens * channels)
        start, size = x.at(grid.prefix * row + 2 * channels), (images, grid.height, grid.width)
        first = 0
        for weight, bias in windows:
            around = (weight.shape[2] // 2, weight.shape[3] // 2)
            self.depthwise((weight, bias), size, around, start.at(first), near.at(first), strides=strides)
            first += len(weight)
        return near

    def factor(
        self, heads: int, images: int, grid: Grid, channels: int, scale: float, x: Place, near: Place | None, out: Place
    ) -> None:
        """See `run_factor`; queries, keys and values are the thirds of (B, N, 3 C)."""
        width, row = channels // heads, 3 * channels
        contexts = self.claim(images * heads * contexts_of(width))
        sizes = {"tokens": grid.tokens, "images": images, "heads": heads, "width": width, "prefix": grid.prefix}
        rows = {"query_row": row, "key_row": row, "value_row": row}
        about = FactorAbout(**rows, **sizes, threads=self.threads, scale=scale)
        places = {"query": x, "key": x.at(channels), "value": x.at(2 * channels), "out": out, "contexts": contexts}
        self.add("factor", about, **places, **({} if near is None else {"near": near}))

    def pool(self, window: int, size: tuple[int, int, int], channels: int, x: Place, onto: Sum) -> None:
        """The mean over a window of images, rows and columns minus its middle, added to the stream."""
        about = PoolAbout(
            residual=pointer(onto.residual),
            branch=pointer(onto.branch),
            images=size[0],
            height=size[1],
            width=size[2],
            channels=channels,
            size=window,
            threads=self.threads,
        )
        self.add("pool", about, x=x, stream=STREAM, out=OUT)

    def mlstm(self, cell: Cell, images: int, source: Place, values: Place, gate: Place, out: Place) -> None:
        """See `run_mlstm`, but silu(gate) is given; `out` may be the same."""
        heads, channels, steps = len(cell.packed.gate_biases), len(cell.skip), self.rows // images
        width = channels // heads
        row, first = (-channels, channels * (self.rows - 1)) if cell.backwards else (channels, 0)
        weights = [pointer(one) for one in (*cell.packed, cell.norm.weight, cell.norm.bias, cell.skip)]
        sizes = (images, steps, heads, width, chunk_for(steps, width, cell.chunk), self.threads, 1)
        about = MlstmAbout(None, None, None, *[row] * 4, *weights, None, None, *sizes, cell.eps, cell.norm.eps)
        places = {"source": source, "values": values, "gate": gate, "out": out}
        self.add("mlstm", about, **{name: place.at(first) for name, place in places.items()})

    # -- how it is written down ------------------------------------------------------------------

    def describe(self, weights: Weights, after: str, then: Then, onto: Sum | None) -> ctypes.Structure:
        weight, bias = weights
        columns, depth = weight.shape
        return LinearAbout(
            right=weight.data_ptr(),
            bias=pointer(bias),
            residual=None if onto is None else pointer(onto.residual),
            branch=None if onto is None else pointer(onto.branch),
            left_row=depth,
            left_column=1,
            right_row=depth,
            out_row=columns,
            rows=self.rows,
            groups=1,
            columns=columns,
            depth=depth,
            right_turned=1,
            after=activation_number(after if onto is None else "onto"),
            threads=self.threads,
            then=then,
        )

    def pack(self, start: int, weights: Weights, before: int = 0) -> int:
        """Room for a packed weight behind so many floats; all steps use the same. The end of it."""
        if self.keeper is not None:
            kept = self.keeper.of(weights[0])
            self.kept.append((start + LinearAbout.ready.offset, kept))
            POINTER.pack_into(self.text, start + LinearAbout.packed.offset, kept.room.data_ptr())
            return before
        columns, depth = weights[0].shape
        self.packed.append((start + LinearAbout.packed.offset, before))
        end = before + -(-columns // PANEL) * PANEL * depth
        self.packed_floats = max(self.packed_floats, end)
        return end

    def add(self, kernel: str, about: ctypes.Structure, **places: Place) -> int:
        places = {name: self.there(place) for name, place in places.items()}
        self.text += struct.pack("lN", kernel_number(kernel), ctypes.sizeof(about))
        start, body = len(self.text), bytes(about)
        self.text += body + bytes(-len(body) % 8)
        for name, place in places.items():
            self.point(start + getattr(type(about), name).offset, place)
        return start

    def point(self, where: int, place: Place) -> None:
        self.places.append((where, place.base, place.bytes))

    def close(self) -> "Steps":
        """All steps are written down."""
        room = self.claim(self.packed_floats)
        for where, before in self.packed:
            self.point(where, room.at(before))
        self.starts = [0, *itertools.accumulate(self.rooms)]
        return self

    def run(self, x: Tensor, stream: Tensor) -> Tensor:
        """The output, as large as the stream; both are contiguous."""
        found, text = kernels(), bytearray(self.text)
        assert found is not None
        out = torch.empty_like(stream)
        bases = [x.data_ptr(), out.data_ptr(), stream.data_ptr()]
        if self.starts[-1] <= MOST:
            rooms = [x.new_empty(self.starts[-1])]
            first = rooms[0].data_ptr()
            bases += [first + FLOAT * start for start in self.starts[:-1]]
        else:
            rooms = [x.new_empty(size) for size in self.rooms]
            bases += [room.data_ptr() for room in rooms]
        for where, base, behind in self.places:
            POINTER.pack_into(text, where, bases[base] + behind)
        for where, kept in self.kept:
            INT.pack_into(text, where, kept.filled)
        found.run_steps(text)
        for _, kept in self.kept:
            kept.filled = True
        return out
