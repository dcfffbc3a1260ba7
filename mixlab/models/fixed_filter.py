"""Long convolutions for one size of input, for graphs that other programs run: constants and real arithmetic only."""

import torch
from torch import Tensor, nn

from mixlab.core.grid import Grid
from mixlab.core.guards import without_autocast
from mixlab.ops.longconv import Form, Prepared, convolve, fastest, fit, prepare
from mixlab.ops.twosteps import convolve_two_steps, prepare_two_steps


class FixedConv(nn.Module):
    """The convolution of (B, N, C) with kernels (taps..., C), for one grid.

    Where the fast Fourier transform would be chosen it is done by products with small matrices: in one step per axis of
    a plane, in two along a sequence.
    """

    kernel: Tensor

    def __init__(self, kernel: Tensor, sizes: tuple[int, ...], *, causal: bool) -> None:
        super().__init__()
        centres = tuple(0 if causal else taps // 2 for taps in kernel.shape[:-1])
        self.sizes = sizes
        self.spans, taps = fit(kernel.detach().float(), sizes, centres)
        self.form: Form = fastest(sizes, tuple(span.taps for span in self.spans))
        self.in_two_steps = self.form == "fft" and len(sizes) == 1
        self.form = "matrix" if self.form == "fft" else self.form
        if self.in_two_steps:
            ready = prepare_two_steps(taps, self.spans[0])
        else:
            ready = prepare(taps, self.spans, self.form).kernel
        self.register_buffer("kernel", ready)

    def forward(self, tokens: Tensor, grid: Grid, factor: Tensor | None = None) -> Tensor:
        out = self.convolve(tokens.unflatten(1, self.sizes))
        return out if factor is None else out * factor

    def convolve(self, x: Tensor) -> Tensor:
        if not self.in_two_steps:
            return convolve(x, Prepared(self.form, self.spans, self.kernel)).flatten(1, -2)
        with without_autocast(x):
            return convolve_two_steps(x.to(torch.float32), self.kernel, self.spans[0]).to(x.dtype)
