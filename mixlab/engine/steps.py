"""Kernels as steps of a plan: what each is told, and which of it are places in the plan's memory.

Weights are pointed at where they lie. Who keeps steps sees to it that these stay there.
"""

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mixlab.core.grid import Grid
from mixlab.engine.kernels import activation_number, pointer
from mixlab.engine.kernels.attention import AttentionAbout
from mixlab.engine.kernels.depthwise import DepthwiseAbout
from mixlab.engine.kernels.factor import FactorAbout, contexts_of
from mixlab.engine.kernels.linear import AS_IT_IS, FEW, PANEL, LinearAbout, MlpAbout, Then, room_for
from mixlab.engine.kernels.longconv import Kernel
from mixlab.engine.kernels.mlstm import MlstmAbout, Packed, chunk_for
from mixlab.engine.kernels.norm import Norm, NormAbout
from mixlab.engine.kernels.pool import PoolAbout
from mixlab.engine.kernels.recurrent import BLOCK as LSTM_BLOCK
from mixlab.engine.kernels.recurrent import Lstms as LstmsAbout
from mixlab.engine.kernels.recurrent import OneLstm, Run
from mixlab.engine.kernels.tokens import MeanAbout, Patch, PatchesAbout, PutAbout

Weights = tuple[Tensor, Tensor | None]
FLOAT = 4  # bytes
JOINED = 288  # rows per thread from which its tasks do a layer's norm: with fewer, several would do the same
TWO = 480  # rows from which two layers are computed together


class Place(NamedTuple):
    """So many numbers after the start of a room."""

    room: int
    floats: int = 0

    def at(self, floats: int) -> "Place":
        return Place(self.room, self.floats + floats)


class Pending(NamedTuple):
    """A norm of rows in a place that whoever reads it may do on the way; they stay as they are until then."""

    norm: Norm
    source: Place
    rows: int
    number: int


class Sum(NamedTuple):
    """A residual sum: residual * stream + branch * update, 1 where there is no factor."""

    stream: Place
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
    """Which thirds of the channels are multiplied after a convolution, and which one is put aside; a norm of the
    product without a bias.
    """

    parts: tuple[int, int, int]
    norm: Norm
    aside: Place


class PackedWeight:
    """A weight in the order in which products read it, once a run has filled it."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.room, self.filled = weight, room_for(weight), False


class KernelStep(NamedTuple):
    """One kernel: what it is told, where in that places are to be written, and where whether a weight is packed."""

    kernel: str
    about: ctypes.Structure
    places: tuple[tuple[int, Place], ...]
    packed: tuple[tuple[int, PackedWeight], ...] = ()


class Steps:
    """Steps in order, and the rooms that they use. With `packed` weights are packed once, else in every run."""

    def __init__(self, packed: dict[int, PackedWeight] | None = None) -> None:
        self.threads, self.packed = torch.get_num_threads(), packed
        self.steps: list[KernelStep] = []
        self.sizes: list[int] = []  # of rooms, in numbers
        self.pending = 0
        self.done: dict[int, Place] = {}  # norms that have become steps of their own

    # -- rooms -----------------------------------------------------------------------------------

    def claim(self, floats: int) -> Place:
        self.sizes.append(floats)
        return Place(len(self.sizes) - 1)

    def norm(self, norm: Norm, source: Place, rows: int) -> Pending:
        """Rows after a norm: part of the linear layers that read it if there are many rows, else a step of its own."""
        self.pending += 1
        return Pending(norm, source, rows, self.pending)

    def there(self, x: Place | Pending) -> Place:
        """Where that lies, behind the norm if one is pending."""
        if isinstance(x, Place):
            return x
        if x.number not in self.done:
            self.done[x.number] = self.normed(x.norm, x.source, x.rows)
        return self.done[x.number]

    # -- what is done ----------------------------------------------------------------------------

    def normed(self, norm: Norm, x: Place, rows: int, row: int | None = None) -> Place:
        """A norm by itself, of rows that begin so many numbers after each other."""
        assert norm.weight is not None
        width = len(norm.weight)
        out = self.claim(rows * width)
        about = NormAbout(
            weight=pointer(norm.weight),
            bias=pointer(norm.bias),
            one_row=row or width,
            rows=rows,
            width=width,
            threads=self.threads,
            eps=norm.eps,
        )
        self.add("norm", about, one=x, out=out)
        return out

    def linear(
        self,
        weights: Weights,
        x: Place | Pending,
        rows: int,
        after: str = "none",
        then: Then = AS_IT_IS,
        onto: Sum | None = None,
    ) -> Place:
        """f(x W^T + b), or a residual sum with that."""
        about, out = self.describe(weights, rows, after, then, onto), self.claim(rows * len(weights[0]))
        places = {"left": self.join(about, x, max(FEW + 1, JOINED * self.threads)), "out": out}
        if onto is not None:
            places["beside"] = onto.stream
        packs = [(0, weights[0])] if rows > FEW or self.packed is not None else []
        self.add("linear", about, packs, **places)
        return out

    def mlp(
        self, first: Weights, second: Weights, x: Place | Pending, rows: int, after: str, then: Then, onto: Sum | None
    ) -> Place:
        """Two linear layers; where there are many rows, what lies between them stays in the cache."""
        if rows < TWO:
            return self.linear(second, self.linear(first, x, rows, after, then), rows, onto=onto)
        out = self.claim(rows * len(second[0]))
        parts = self.describe(first, rows, after, then, None), self.describe(second, rows, "none", AS_IT_IS, onto)
        source, behind = self.join(parts[0], x, 0), MlpAbout.second.offset
        about = MlpAbout(*parts, 0)
        places = [(LinearAbout.left.offset, source), (behind + LinearAbout.out.offset, out)]
        if onto is not None:
            places.append((behind + LinearAbout.beside.offset, onto.stream))
        self.write("mlp", about, places, [(0, first[0]), (behind, second[0])])
        return out

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
        adds: bool = False,
    ) -> None:
        """Kernels (C, 1, h, w) over images, rows and columns; `product`: see `convolve_and_multiply`. `strides`: from a
        pixel and an image to the next of `x` and `out`, if they do not lie one after the other.
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
            adds=adds,
            after=activation_number(after),
            threads=self.threads,
            eps=0 if product is None else product.norm.eps,
        )
        places = {"x": x, "out": out}
        if product is not None:
            places["aside"] = product.aside
        self.add("depthwise", about, **places)

    def long_conv(self, kernel: Kernel, prepared: Tensor, size: tuple[int, int, int], x: Place, factor: Place) -> Place:
        """See `convolve_maps`: with a spectrum, or with taps as they are."""
        images, height, width = size
        out = self.claim(images * height * width * kernel.channels)
        name = "taps" if prepared.ndim > 1 else "spectrum"
        sizes = {"images": images, "height": height, "width": width, "factor_row": kernel.channels}
        about = kernel.about(**{name: pointer(prepared)}, **sizes)
        self.add("longconv", about, x=x, factor=factor, out=out)
        return out

    def attention(self, heads: int, images: int, tokens: int, channels: int, x: Place) -> Place:
        """See `run_attention`."""
        width, row, out = channels // heads, 3 * channels, self.claim(images * tokens * channels)
        sizes = {"tokens": tokens, "images": images, "heads": heads, "width": width, "threads": self.threads}
        about = AttentionAbout(image=tokens * row, row=row, scale=width**-0.5, parts=1, **sizes)
        self.add("attention", about, qkv=x, out=out)
        return out

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
        self, heads: int, images: int, grid: Grid, channels: int, scale: float, x: Place, near: Place | None
    ) -> Place:
        """See `run_factor`; queries, keys and values are the thirds of (B, N, 3 C)."""
        width, row, out = channels // heads, 3 * channels, self.claim(images * grid.tokens * channels)
        contexts = self.claim(images * heads * contexts_of(width))
        sizes = {"tokens": grid.tokens, "images": images, "heads": heads, "width": width, "prefix": grid.prefix}
        rows = {"query_row": row, "key_row": row, "value_row": row}
        about = FactorAbout(**rows, **sizes, threads=self.threads, scale=scale)
        places = {"query": x, "key": x.at(channels), "value": x.at(2 * channels), "out": out, "contexts": contexts}
        self.add("factor", about, **places, **({} if near is None else {"near": near}))
        return out

    def pool(self, window: int, size: tuple[int, int, int], channels: int, x: Place, onto: Sum | None) -> Place:
        """The mean over a window of images, rows and columns minus its middle, or a residual sum with that."""
        images, height, width = size
        out = self.claim(images * height * width * channels)
        about = PoolAbout(
            residual=None if onto is None else pointer(onto.residual),
            branch=None if onto is None else pointer(onto.branch),
            images=images,
            height=height,
            width=width,
            channels=channels,
            size=window,
            threads=self.threads,
        )
        self.add("pool", about, x=x, out=out, **({} if onto is None else {"stream": onto.stream}))
        return out

    def mlstm(self, cell: Cell, images: int, tokens: int, source: Place, values: Place, gate: Place) -> Place:
        """See `run_mlstm`, but silu(gate) is given; the result takes its place."""
        heads, channels = len(cell.packed.gate_biases), len(cell.skip)
        width = channels // heads
        row, first = (-channels, channels * (images * tokens - 1)) if cell.backwards else (channels, 0)
        weights = [pointer(one) for one in (*cell.packed, cell.norm.weight, cell.norm.bias, cell.skip)]
        sizes = (images, tokens, heads, width, chunk_for(tokens, width, cell.chunk), self.threads, 1)
        about = MlstmAbout(None, None, None, *[row] * 4, *weights, None, None, *sizes, cell.eps, cell.norm.eps)
        places = {"source": source, "values": values, "gate": gate, "out": gate}
        self.add("mlstm", about, **{name: place.at(first) for name, place in places.items()})
        return gate

    def patches(
        self,
        patch: Patch,
        source: Any,
        images: tuple[int, int],
        rows: tuple[int, int],
        columns: int,
        weights: Weights,
        out: Place,
    ) -> None:
        """The product of weights with the patches of some images and some rows of patches, written to `out`."""
        (weight, _), (height, width) = weights, source.grid[:2]
        count = (images[1] - images[0]) * (rows[1] - rows[0]) * columns
        room = self.claim(count * weight.shape[1])
        about = PatchesAbout(
            x_image=source.strides[0],
            x_row=source.strides[1],
            x_column=source.strides[2],
            x_channel=source.strides[3],
            images=images[1] - images[0],
            height=height,
            width=width,
            channels=source.channels,
            high=patch.high,
            wide=patch.wide,
            stride=patch.stride,
            above=patch.padding[0] - rows[0] * patch.stride,
            before=patch.padding[1],
            out_height=rows[1] - rows[0],
            out_width=columns,
            channels_first=patch.channels_first,
            threads=self.threads,
        )
        self.add("patches", about, x=source.place.at(images[0] * source.strides[0]), out=room)
        packs = [(0, weight)] if count > FEW or self.packed is not None else []
        self.add("linear", self.describe(weights, count, "none", AS_IT_IS, None), packs, left=room, out=out)

    def mean(self, x: Place, tokens: Any, count: int) -> Place:
        """The mean of so many tokens of every image, from a place on."""
        images, channels = tokens.images, tokens.channels
        out = self.claim(images * channels)
        about = MeanAbout(
            x_image=tokens.grid.tokens * channels,
            x_row=channels,
            out_row=channels,
            tokens=count,
            images=images,
            width=channels,
            threads=self.threads,
        )
        self.add("mean", about, x=x, out=out)
        return out

    def put(
        self,
        x: Place | Tensor,
        out: Place,
        size: tuple[int, int, int],
        x_strides: tuple[int, int],
        out_strides: tuple[int, int],
        plus: Tensor | None = None,
        plus_strides: tuple[int, int] = (0, 0),
    ) -> None:
        """Write rows of images somewhere, with something added; strides are from an image and a row to the next."""
        images, rows, width = size
        about = PutAbout(
            x=pointer(x) if isinstance(x, Tensor) else None,
            y=pointer(plus),
            x_image=x_strides[0],
            x_row=x_strides[1],
            y_image=plus_strides[0],
            y_row=plus_strides[1],
            out_image=out_strides[0],
            out_row=out_strides[1],
            images=images,
            rows=rows,
            width=width,
            threads=self.threads,
        )
        places = {"out": out} if isinstance(x, Tensor) else {"out": out, "x": x}
        self.add("put", about, (), **places)

    def lstm(self, runs: Sequence[Run], x: Place, size: tuple[int, int, int], out: Place) -> None:
        """LSTM layers over the same maps; their outputs lie side by side. `x` is not changed."""
        images, height, width = size
        row = sum(run.units for run in runs)
        about = LstmsAbout(count=len(runs), images=images, packs=1, threads=self.threads)
        places: list[tuple[int, Place]] = []
        for index, run in enumerate(runs):
            shares = self.linear((run.weights[0], run.weights[2]), x, images * height * width)
            packed = self.claim(-(-run.units // LSTM_BLOCK) * LSTM_BLOCK * 4 * run.units)
            layer = about.each[index]
            layer.weight, layer.bias = pointer(run.weights[1]), pointer(run.weights[3])
            layer.out_row, layer.height, layer.width, layer.units = row, height, width, run.units
            layer.vertical, layer.backwards = run.vertical, run.backwards
            start = LstmsAbout.each.offset + index * ctypes.sizeof(OneLstm)
            for name, place in (("inputs", shares), ("packed", packed), ("out", out)):
                places.append((start + getattr(OneLstm, name).offset, place))
            out = out.at(run.units)
        self.write("lstm", about, places)

    # -- how it is written down ------------------------------------------------------------------

    def join(self, about: ctypes.Structure, x: Place | Pending, least: int) -> Place:
        """What a linear layer reads, with a norm in front of it as the layer's own from so many rows on."""
        if isinstance(x, Place) or x.rows < least:
            return self.there(x)
        assert x.norm.weight is not None
        assert len(x.norm.weight) == about.depth
        about.norm, about.norm_bias, about.eps = pointer(x.norm.weight), pointer(x.norm.bias), x.norm.eps
        return x.source

    def describe(self, weights: Weights, rows: int, after: str, then: Then, onto: Sum | None) -> ctypes.Structure:
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
            rows=rows,
            groups=1,
            columns=columns,
            depth=depth,
            right_turned=1,
            after=activation_number(after if onto is None else "onto"),
            threads=self.threads,
            then=then,
        )

    def add(
        self, kernel: str, about: ctypes.Structure, packs: Iterable[tuple[int, Tensor]] = (), /, **places: Place
    ) -> None:
        offsets = [(getattr(type(about), name).offset, place) for name, place in places.items()]
        self.write(kernel, about, offsets, packs)

    def write(
        self,
        kernel: str,
        about: ctypes.Structure,
        places: list[tuple[int, Place]],
        packs: Iterable[tuple[int, Tensor]] = (),
    ) -> None:
        """Add a step, with weights to be packed by the layers that begin at such offsets."""
        kept: list[tuple[int, PackedWeight]] = []
        for offset, weight in packs:
            if self.packed is None:
                places.append((offset + LinearAbout.packed.offset, self.claim(packed_size(weight))))
                continue
            packed = self.packed.get(id(weight)) or PackedWeight(weight)
            self.packed[id(weight)] = packed
            pointed = LinearAbout.from_buffer(about, offset)
            pointed.packed = packed.room.data_ptr()
            kept.append((offset + LinearAbout.ready.offset, packed))
        self.steps.append(KernelStep(kernel, about, tuple(places), tuple(kept)))


def packed_size(weight: Tensor) -> int:
    """Numbers in a packed weight."""
    columns, depth = weight.shape
    return -(-columns // PANEL) * PANEL * depth
