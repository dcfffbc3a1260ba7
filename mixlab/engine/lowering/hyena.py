"""Hyena: projections with a short convolution, a product, a long convolution times the next projection."""

from torch import Tensor, nn

from mixlab.core.grid import Grid
from mixlab.engine.backends.longconv import kernel_of
from mixlab.engine.draft import Draft, Tokens
from mixlab.engine.kernels.longconv import Kernel, make_spectrum, spectrum_size
from mixlab.engine.kernels.norm import Norm
from mixlab.engine.lowering.base import lowers
from mixlab.engine.lowering.convolution import depthwise_weights
from mixlab.engine.lowering.layers import layer_norm
from mixlab.engine.steps import Pending, Place, Product, Sum
from mixlab.models.mixers.hyena import Hyena, PlaneConv, SequenceConv
from mixlab.ops.longconv import fit, spans_of

SPECTRUM_NUMBERS = 2**20  # in a spectrum; larger ones are made anew from the taps, block by block: 4 MB
KEPT_NUMBERS = 2**20  # in what is kept of a layer's filter: 4 MB


@lowers(Hyena)
def hyena(draft: Draft, mixer: Hyena, x: Place | Pending, tokens: Tokens, onto: Sum | None) -> Place:
    channels, grid, images, rows = tokens.channels, tokens.grid, tokens.images, tokens.rows
    draft.require(not grid.prefix, "class tokens need zeros in their places")
    draft.require(not len(mixer.further), "the order is above 2")
    project = draft.linear_weights(mixer.project, channels, 3 * channels)
    project_out = draft.linear_weights(mixer.out, channels, channels)
    taps = depthwise_weights(draft, mixer.short, 3 * channels)
    inner, outer = norm_of(draft, mixer.inner_norm, channels), norm_of(draft, mixer.outer_norm, channels)
    draft.require(inner.bias is None, "the norm of the product has a bias")
    about, spectrum = long_filter(draft, mixer.conv, grid, channels)
    over, (height, width) = mixer.over(grid), mixer.short.kernel_size
    padding = (height // 2, width - 1 if mixer.causal else width // 2)
    one, other, last = mixer.roles
    wide = draft.linear(project, x, rows)
    product, gate = draft.claim(rows * channels), draft.claim(rows * channels)
    parts = Product((one, other, last), inner, gate)
    draft.depthwise(taps, (images, over.height, over.width), padding, wide, product, product=parts)
    sides = (over.height, over.width) if mixer.plane else (over.width, 1)  # a sequence is a column
    mixed = draft.long_conv(about, spectrum, (images, *sides), product, gate)
    reads = mixed if outer.weight is None else draft.norm(outer, mixed, rows)
    return draft.linear(project_out, reads, rows, onto=onto)


def norm_of(draft: Draft, norm: nn.Module, channels: int) -> Norm:
    """A layer norm, or none."""
    if type(norm) is nn.Identity:
        draft.watch(norm)
        return Norm(None, None, 0.0)
    return layer_norm(draft, norm, channels)


def long_filter(draft: Draft, conv: nn.Module, grid: Grid, channels: int) -> tuple[Kernel, Tensor]:
    """The filter for this grid, and its spectrum or taps as the kernel reads them."""
    draft.exactly(conv, SequenceConv, PlaneConv)
    assert isinstance(conv, (SequenceConv, PlaneConv))
    draft.require(conv.reuse, "filters are not to be reused")
    draft.require(conv.form in (None, "native"), f"the form {conv.form!r} was asked for")
    sizes, taps = conv.sizes(grid), conv.taps_for(grid)
    centers = tuple(0 if conv.filter.causal else count // 2 for count in taps)
    about = kernel_of(spans_of(taps, sizes, centers), channels)
    as_spectrum = spectrum_size(about) <= SPECTRUM_NUMBERS
    numbers = spectrum_size(about) if as_spectrum else about.high * about.wide * channels
    draft.require(numbers <= KEPT_NUMBERS, "the filter is too large to be kept")

    def prepared() -> Tensor:
        _, kernel = fit(conv.kernel(grid).float(), sizes, centers)
        return make_spectrum(about, kernel.contiguous()) if as_spectrum else kernel.contiguous()

    return about, draft.derived(conv, ("spectrum", grid, as_spectrum), conv.sources(), prepared)
