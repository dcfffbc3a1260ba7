"""The mLSTM layer: up-projection, gate, convolution, cell, down-projection."""

from mixlab.core.grid import Grid
from mixlab.engine.backends.recurrent import pack
from mixlab.engine.draft import Draft, Tokens
from mixlab.engine.kernels.mlstm import BLOCK, WIDTH
from mixlab.engine.kernels.norm import Norm
from mixlab.engine.lowering.base import lowers
from mixlab.engine.lowering.convolution import depthwise_weights
from mixlab.engine.steps import Cell, Pending, Place, Sum
from mixlab.models.mixers.mlstm import Mlstm
from mixlab.ops.layers import HeadNorm
from mixlab.ops.mlstm import EPS


@lowers(Mlstm)
def mlstm(draft: Draft, mixer: Mlstm, x: Place | Pending, tokens: Tokens, onto: Sum | None) -> Place:
    channels, grid, images, conv = tokens.channels, tokens.grid, tokens.images, mixer.conv
    draft.require(not grid.prefix, "class tokens take part in the walk")
    draft.require(mixer.form == "chunkwise", f"the form {mixer.form!r} was asked for")
    draft.require(conv is not None, "there is no convolution in front of queries and keys")
    assert conv is not None
    up = draft.linear_weights(mixer.up, channels)
    inner = len(up[0])
    gate = draft.linear_weights(mixer.gate, channels, inner)
    down = draft.linear_weights(mixer.down, inner, channels)
    taps = depthwise_weights(draft, conv, inner)
    cell = cell_of(draft, mixer, inner)
    start = mixer.path._replace(backwards=False)  # kernels walk backwards without turning tokens round
    walk = Grid(grid.width, grid.height) if start.columns else grid

    def there(place: Place) -> Place:
        return draft.call(lambda x: start.arrange(x, grid)[0], tokens.shape, (place, tokens.shape))

    if any(start):
        x = draft.norm(x.norm, there(x.source), x.rows) if isinstance(x, Pending) else there(x)
        onto = None if onto is None else onto._replace(stream=there(onto.stream))
    height, width = conv.kernel_size
    size = (images, walk.height, walk.width) if height > 1 else (images, 1, walk.image_tokens)
    padding = (height // 2, width - 1 if mixer.causal else width // 2)
    values = draft.linear(up, x, tokens.rows)
    gates = draft.linear(gate, x, tokens.rows, "silu")
    source = draft.claim(tokens.rows * inner)
    draft.depthwise(taps, size, padding, values, source, "silu", turned=mixer.path.backwards)
    mixed = draft.mlstm(cell, images, grid.tokens, source, values, gates)
    out = draft.linear(down, mixed, tokens.rows, onto=onto)
    if not any(start):
        return out
    return draft.call(lambda x: start.restore(x, walk), tokens.shape, (out, tokens.shape))


def cell_of(draft: Draft, mixer: Mlstm, inner: int) -> Cell:
    """The cell with its weights packed as the kernel reads them."""
    draft.exactly(mixer.norm, HeadNorm)
    width = inner // mixer.heads
    draft.require(
        mixer.query.weight.shape[1] == BLOCK and width % WIDTH == 0, "the kernel is for other heads or blocks"
    )
    norm, bias = mixer.norm, mixer.norm.bias
    layers = (mixer.query, mixer.key, mixer.value, mixer.input_gate, mixer.forget_gate)
    sources = [parameter for layer in layers for parameter in layer.parameters()]
    packed = draft.derived(mixer, ("packed",), sources, lambda: pack(mixer.cell()))
    of_norm = Norm(draft.tensor(norm.weight, inner), None if bias is None else draft.tensor(bias, inner), norm.eps)
    return Cell(packed, of_norm, draft.tensor(mixer.skip, inner), EPS, mixer.chunk, mixer.path.backwards)
