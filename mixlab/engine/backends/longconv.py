"""Long convolutions by our own fast Fourier transform, with channels side by side."""

import functools

from torch import Tensor

from mixlab.engine.kernels.longconv import Kernel, convolve_maps
from mixlab.engine.reasons import needs, why_no_kernel
from mixlab.ops.longconv import LONG_CONV, Span, fit, good_size
from mixlab.ops.operator import Backend


def supports(x: Tensor, kernel: Tensor, factor: Tensor | None, causal: bool, form: str) -> str | None:
    given = (x, kernel) if factor is None else (x, kernel, factor)
    return (
        needs(form in ("", "native"), "another form is asked for")
        or why_no_kernel(*given)
        or needs(x.ndim in (3, 4) and kernel.ndim == x.ndim - 1, "a kernel of other axes than the input")
        or needs(x.shape[-1] == kernel.shape[-1], "a kernel of other channels than the input")
        or needs(factor is None or factor.shape == x.shape, "a factor of another shape than the input")
        or needs(all(part.stride(-1) == 1 for part in given), "channels that do not lie side by side")
    )


def convolve(x: Tensor, kernel: Tensor, factor: Tensor | None, causal: bool, form: str) -> Tensor:
    """A sequence is a column."""
    centers = tuple(0 if causal else taps // 2 for taps in kernel.shape[:-1])
    spans, taps = fit(kernel, tuple(x.shape[1:-1]), centers)
    about, taps = kernel_of(spans, x.shape[-1]), taps.contiguous()
    if len(spans) == 2:
        return convolve_maps(x.contiguous(), about, taps=taps, factor=factor)
    factor = None if factor is None else factor[:, :, None]
    return convolve_maps(x.contiguous()[:, :, None], about, taps=taps, factor=factor)[:, :, 0]


@functools.lru_cache(maxsize=1024)
def kernel_of(spans: tuple[Span, ...], channels: int) -> Kernel:
    rows, columns = (spans[0], Span(1, 0, 0)) if len(spans) == 1 else spans
    periods = (good_size(rows.period), 1 if len(spans) == 1 else good_size(columns.period))
    return Kernel(rows.taps, columns.taps, channels, *periods, rows.future, columns.future)


LONG_CONV.serve(Backend("kernel", supports, convolve), first=True)
