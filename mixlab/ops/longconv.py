"""Depthwise convolutions with kernels up to twice the size of what they run over (HyenaPixel, section 3).

    y[i] = sum over j of kernel[i - j + centre] * x[j] + bias * x[i]

for each channel, in one axis of (B, L, C) with kernels (K, C) or in two of (B, H, W, C) with kernels (KH, KW, C), zeros
outside. The centre is at K // 2, or at 0 if the convolution is causal. Three forms compute the same:

`direct` as it is written, `fft` through the fast Fourier transform, and `matrix` through the same transform as products
with small constant matrices: more arithmetic, but of the kind that processors are best at, without moving the channels.
Unless one of these is asked for, a backend may do it: `native` is the fast transform by a kernel for CPUs.
`prepare_1d` and `prepare_2d` bring a kernel into the shape that a form needs.
"""

import functools
import json
import math
from collections.abc import Callable
from importlib import resources
from operator import index
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mixlab.core.guards import is_constant, without_autocast
from mixlab.ops.depthwise import depthwise
from mixlab.ops.fourier import constant, forward, forward_half, inverse, inverse_half
from mixlab.ops.operator import Backend, Operator

Form = Literal["direct", "matrix", "fft", "native"]
FFT_NUMBERS = 2**20  # real numbers that are transformed at once: 4 MB
MATRIX_NUMBERS = 2**21  # in the spectra of images that are transformed together: 8 MB


class Span(NamedTuple):
    """One axis: places, and taps of the kernel that reach from `future` places behind to `past` in front."""

    size: int
    future: int
    past: int

    @property
    def taps(self) -> int:
        return self.future + 1 + self.past

    @property
    def period(self) -> int:
        """The shortest circle on which what wraps around falls outside."""
        return self.size + max(self.future, self.past)


class Prepared(NamedTuple):
    """A kernel in the shape that a form needs, for one size of input; `spans` has an entry per axis."""

    form: Form
    spans: tuple[Span, ...]
    kernel: Tensor


# -- in one call ---------------------------------------------------------------------------------


def by_form(
    x: Tensor, kernel: Tensor, factor: Tensor | None, causal: bool, form: str, *, overwrites: bool = False
) -> Tensor:
    """The convolution with a kernel as it is, by a form or the one that is known to be fastest for the shape."""
    wanted: Any = None if form in ("", "native") else form
    if x.ndim == 3:
        prepared = prepare_1d(kernel, x.shape[1], causal=causal, form=wanted)
    else:
        prepared = prepare_2d(kernel, x.shape[1], x.shape[2], form=wanted)
    return convolve(x, prepared, factor=factor, overwrites=overwrites)


LONG_CONV = Operator(
    "long_conv",
    by_form,
    inputs="Tensor x, Tensor kernel, Tensor? factor",
    settings="bool causal, str form",
    devices=("CPU", "CUDA"),
)


def long_conv(
    x: Tensor, kernel: Tensor, factor: Tensor | None = None, *, causal: bool = False, form: Form | None = None
) -> Tensor:
    """Over the middle axis of (B, L, C) or the two middle axes of (B, H, W, C), times a factor of that shape."""
    return LONG_CONV(x, kernel, factor, causal, form or "")


def long_conv_1d(
    x: Tensor, kernel: Tensor, bias: Tensor | None = None, *, causal: bool = False, form: Form | None = None
) -> Tensor:
    """Over the middle axis of (B, L, C), plus x times a bias per channel."""
    return with_bias(long_conv(x, kernel, causal=causal, form=form), x, bias)


def long_conv_2d(x: Tensor, kernel: Tensor, bias: Tensor | None = None, *, form: Form | None = None) -> Tensor:
    """Over the two middle axes of (B, H, W, C), plus x times a bias per channel."""
    return with_bias(long_conv(x, kernel, form=form), x, bias)


def with_bias(out: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else torch.addcmul(out, x, bias.to(out.dtype)).to(out.dtype)


# -- in two steps --------------------------------------------------------------------------------


def prepare_1d(kernel: Tensor, length: int, *, causal: bool = False, form: Form | None = None) -> Prepared:
    """A kernel (K, C) for sequences of one length; the form is the one that is known to be fastest unless given."""
    length, taps = index(length), index(kernel.shape[0])  # a compiler shall take sizes as they are
    (span,), kernel = fit(kernel, (length,), (0 if causal else taps // 2,))
    return prepare(kernel, (span,), form or fastest((length,), (span.taps,)))


def prepare_2d(kernel: Tensor, height: int, width: int, *, form: Form | None = None) -> Prepared:
    """The same of a kernel (KH, KW, C) for maps of one size."""
    height, width = index(height), index(width)
    centres = (index(kernel.shape[0]) // 2, index(kernel.shape[1]) // 2)
    spans, kernel = fit(kernel, (height, width), centres)
    return prepare(kernel, spans, form or fastest((height, width), tuple(span.taps for span in spans)))


def prepare(kernel: Tensor, spans: tuple[Span, ...], form: Form) -> Prepared:
    kernel = kernel if kernel.dtype is torch.float64 else kernel.float()
    if kernel.is_meta:
        return Prepared(form, spans, kernel)
    with without_autocast(kernel):
        return Prepared(form, spans, FORMS[form][0](kernel, spans))


def convolve(
    x: Tensor,
    prepared: Prepared,
    bias: Tensor | None = None,
    *,
    factor: Tensor | None = None,
    overwrites: bool = False,
) -> Tensor:
    """The convolution of (B, L, C) or (B, H, W, C), in float32 at least, in the dtype of x, times a factor.

    `overwrites`: in little memory beside the input, for what no gradient is recorded of.
    """
    double = torch.float64 in (x.dtype, prepared.kernel.dtype) or prepared.kernel.dtype is torch.complex128
    exact = x.to(torch.float64 if double else torch.float32)
    if x.is_meta:
        out = count_transforms(exact, prepared)
    else:
        with without_autocast(x):
            out = FORMS[prepared.form][1](exact, prepared.kernel, prepared.spans, overwrites)
    out = (out if bias is None else torch.addcmul(out, exact, bias.to(out.dtype))).to(x.dtype)
    return out if factor is None else out * factor


def fit(kernel: Tensor, sizes: tuple[int, ...], centres: tuple[int, ...]) -> tuple[tuple[Span, ...], Tensor]:
    """The taps that can meet a place: those beyond the other end of the input cannot."""
    spans = spans_of(tuple(map(index, kernel.shape)), sizes, centres)
    for axis, (span, centre) in enumerate(zip(spans, centres, strict=True)):
        kernel = kernel.narrow(axis, centre - span.future, span.taps)
    return spans, kernel


def spans_of(taps: tuple[int, ...], sizes: tuple[int, ...], centres: tuple[int, ...]) -> tuple[Span, ...]:
    """An entry per axis for a kernel of so many taps, of those that can meet a place."""
    return tuple(
        Span(size, min(centre, size - 1), min(count - 1 - centre, size - 1))
        for count, size, centre in zip(taps, sizes, centres, strict=False)
    )


# -- the direct form -----------------------------------------------------------------------------


def prepare_direct(kernel: Tensor, spans: tuple[Span, ...]) -> Tensor:
    """(C, 1, KH, KW) for PyTorch, whose convolutions do not turn the kernel around."""
    flipped = kernel.flip(tuple(range(len(spans))))
    return (flipped[None] if len(spans) == 1 else flipped).permute(2, 0, 1)[:, None].contiguous()


def convolve_direct(x: Tensor, kernel: Tensor, spans: tuple[Span, ...], overwrites: bool) -> Tensor:
    image = (x[:, None] if len(spans) == 1 else x).permute(0, 3, 1, 2)
    *rows, columns = spans
    around = [columns.past, columns.future, *((rows[0].past, rows[0].future) if rows else ())]
    out = depthwise(F.pad(image, around), kernel, None, (0, 0)).permute(0, 2, 3, 1)
    return out[:, 0] if len(spans) == 1 else out


# -- the fast Fourier transform ------------------------------------------------------------------


def prepare_fft(kernel: Tensor, spans: tuple[Span, ...]) -> Tensor:
    """The spectrum (C, ...) of the kernel, its first tap at place 0."""
    axes = tuple(range(1, 1 + len(spans)))
    return torch.fft.rfftn(kernel.movedim(-1, 0).contiguous(), good_sizes(spans), axes)


def convolve_fft(x: Tensor, kernel: Tensor, spans: tuple[Span, ...], overwrites: bool) -> Tensor:
    """If it `overwrites`, some channels at a time, so that large inputs need little memory beside themselves."""
    if not overwrites:
        return transform(x, kernel, spans, overwrites).contiguous()
    if not x.numel():
        return x
    group = max(1, FFT_NUMBERS // max(1, x.shape[0] * math.prod(good_sizes(spans))))
    if group >= x.shape[-1]:
        return transform(x, kernel, spans, overwrites).contiguous()
    out = torch.empty_like(x)
    for part, its, target in zip(x.split(group, -1), kernel.split(group), out.split(group, -1), strict=True):
        target.copy_(transform(part, its, spans, overwrites))
    return out


def transform(x: Tensor, kernel: Tensor, spans: tuple[Span, ...], overwrites: bool) -> Tensor:
    axes, sizes = tuple(range(2, 2 + len(spans))), good_sizes(spans)
    spectrum = torch.fft.rfftn(x.movedim(-1, 1).contiguous(), sizes, axes)
    spectrum = spectrum.mul_(kernel) if overwrites else spectrum * kernel
    out = torch.fft.irfftn(spectrum, sizes, axes)
    for axis, span in zip(axes, spans, strict=True):
        out = out.narrow(axis, span.future, span.size)
    return out.movedim(1, -1)


def good_sizes(spans: tuple[Span, ...]) -> tuple[int, ...]:
    return tuple(good_size(span.period) for span in spans)


def good_size(least: int) -> int:
    """The next even number without prime factors above 7."""
    return next(size for size in range(least + least % 2, 4 * least + 2, 2) if smooth(size))


def smooth(number: int) -> bool:
    for factor in (2, 3, 5, 7):
        while number % factor == 0:
            number //= factor
    return number == 1


# -- the Fourier transform as matrix products ----------------------------------------------------


def prepare_matrix(kernel: Tensor, spans: tuple[Span, ...]) -> Tensor:
    """The spectrum (2, n, half of m, C) of a kernel whose centre is at place 0."""
    rows, columns = both(spans)
    return spectrum(
        kernel.view(1, rows.taps, columns.taps, -1), rows.period, columns.period, -rows.future, -columns.future
    )[0]


def convolve_matrix(x: Tensor, kernel: Tensor, spans: tuple[Span, ...], overwrites: bool) -> Tensor:
    """If it `overwrites`, as many images at a time as keep their spectra near the processor."""
    if not overwrites:
        return transform_by_matrices(x, kernel, spans, overwrites)
    group = max(1, MATRIX_NUMBERS // max(1, kernel.numel()))
    if group >= x.shape[0]:
        return transform_by_matrices(x, kernel, spans, overwrites)
    out = torch.empty_like(x)
    for part, target in zip(x.split(group), out.split(group), strict=True):
        target.copy_(transform_by_matrices(part, kernel, spans, overwrites))
    return out


def transform_by_matrices(x: Tensor, kernel: Tensor, spans: tuple[Span, ...], overwrites: bool) -> Tensor:
    rows, columns = both(spans)
    batch, channels, halves = x.shape[0], x.shape[-1], columns.period // 2 + 1
    image = x.reshape(batch, rows.size, columns.size, channels)
    product = complex_product(spectrum(image, rows.period, columns.period), kernel, overwrites)
    back = constant(inverse, rows.size, rows.period, like=x)  # (2H, 2n)
    lines = left_product(back, product.view(batch, 2 * rows.period, halves * channels))
    back = constant(inverse_half, columns.size, columns.period, like=x)  # (W, 2 halves)
    return left_product(back, lines.view(batch * rows.size, 2 * halves, channels)).view(x.shape)


def both(spans: tuple[Span, ...]) -> tuple[Span, Span]:
    """Rows and columns; a sequence is one row."""
    return (Span(1, 0, 0), spans[0]) if len(spans) == 1 else (spans[0], spans[1])


def spectrum(x: Tensor, rows: int, columns: int, top: int = 0, left: int = 0) -> Tensor:
    """(B, H, W, C) at places from (top, left) on as (B, 2, rows, half of columns, C)."""
    batch, height, width, channels = x.shape
    halves = columns // 2 + 1
    there = constant(forward_half, width, columns, left, like=x)  # (2 halves, W)
    lines = left_product(there, x.reshape(batch * height, width, channels))
    there = constant(forward, height, rows, top, like=x)  # (2n, 2H)
    out = left_product(there, lines.view(batch, 2 * height, halves * channels))
    return out.view(batch, 2, rows, halves, channels)


def left_product(matrix: Tensor, stack: Tensor) -> Tensor:
    """matrix @ each of (X, rows, columns), without a copy of either."""
    if not torch.compiler.is_compiling() and len(stack) == 1:  # a stack of one would be computed on one core
        return (matrix @ stack[0])[None]
    return torch.bmm(matrix.expand(stack.shape[0], -1, -1), stack)


def complex_product(spectrum: Tensor, kernel: Tensor, overwrites: bool) -> Tensor:
    """(B, 2, ...) times (2, ...)."""
    (a, b), (c, d) = spectrum.unbind(1), kernel.unbind(0)
    if not overwrites:
        return torch.stack([a * c - b * d, a * d + b * c], 1)
    out = torch.empty_like(spectrum)
    torch.mul(a, c, out=out[:, 0]).addcmul_(b, d, value=-1)
    torch.mul(a, d, out=out[:, 1]).addcmul_(b, c)
    return out


Prepare = Callable[[Tensor, tuple[Span, ...]], Tensor]
Convolve = Callable[[Tensor, Tensor, tuple[Span, ...], bool], Tensor]
FORMS: dict[Form, tuple[Prepare, Convolve]] = {
    "direct": (prepare_direct, convolve_direct),
    "matrix": (prepare_matrix, convolve_matrix),
    "fft": (prepare_fft, convolve_fft),
}


def in_place(x: Tensor, kernel: Tensor, factor: Tensor | None, causal: bool, form: str) -> Tensor:
    return by_form(x, kernel, factor, causal, form, overwrites=True)


LONG_CONV.serve(Backend("in place", lambda *call: None, in_place))


# -- which form ----------------------------------------------------------------------------------


class Cost(NamedTuple):
    """What was measured for one shape: seconds of each form; a form that was not worth measuring is absent."""

    size: float
    taps: float
    seconds: dict[Form, float]


@functools.cache
def costs() -> dict[int, list[Cost]]:
    """What `make costs` measured, by the number of axes."""
    file = resources.files("mixlab") / "configs" / "longconv.json"
    table = json.loads(file.read_text(encoding="utf-8"))
    return {int(axes): [Cost(**row) for row in rows] for axes, rows in table["seconds"].items()}


@is_constant
def fastest(sizes: tuple[int, ...], taps: tuple[int, ...]) -> Form:
    """The form that was fastest for the nearest shape that was measured: nothing but the shape decides."""
    return nearest(sizes, taps)


@functools.cache
def nearest(sizes: tuple[int, ...], taps: tuple[int, ...]) -> Form:
    size = math.prod(sizes) ** (1 / len(sizes))
    reach = math.prod(taps) ** (1 / len(taps))
    near = min(costs()[len(sizes)], key=lambda row: math.hypot(math.log(row.size / size), math.log(row.taps / reach)))
    known = [form for form in near.seconds if form != "native"]  # that one is chosen by what it may serve
    return min(known, key=lambda form: near.seconds[form])


def count_transforms(x: Tensor, prepared: Prepared) -> Tensor:
    """Without data only shapes and operator counts matter: transforms of the kernel, the input and the output."""
    axes = tuple(range(2, 2 + len(prepared.spans)))
    sizes = tuple(max(2 * span.size, span.taps) for span in prepared.spans)
    image = x.movedim(-1, 1)
    spectrum = torch.fft.rfftn(prepared.kernel.movedim(-1, 0)[None], sizes, axes)
    out = torch.fft.irfftn(torch.fft.rfftn(image, sizes, axes) * spectrum, sizes, axes)
    for axis, span in zip(axes, prepared.spans, strict=True):
        out = out.narrow(axis, 0, span.size)
    return out.movedim(1, -1)
