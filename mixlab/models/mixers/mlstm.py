"""The mLSTM layer of Vision-LSTM: a matrix memory that walks over the patches, inside a gated projection."""

import itertools
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixlab.core.errors import require
from mixlab.core.grid import Grid
from mixlab.core.guards import is_exported, is_transformed, without_autocast
from mixlab.core.hooks import derived
from mixlab.engine.kernels import HAS_TAGS, has_kernels, may_run
from mixlab.engine.kernels.depthwise import convolve_channels
from mixlab.engine.kernels.mlstm import BLOCK, WIDTH, Packed, compiled_mlstm, run_mlstm, turned
from mixlab.engine.kernels.norm import Norm
from mixlab.models.layers import is_depthwise, is_plain, linear_for_fusion, through, weights_of
from mixlab.models.mixers.base import MIXERS, BlockParts, Mixer, StageParts
from mixlab.ops.blockdiagonal import block_diagonal, densify_heads, grouped_heads, may_train_heads, trained_heads
from mixlab.ops.mlstm import EPS, mlstm_chunkwise, mlstm_parallel, mlstm_recurrent

Directions = Literal["uni", "bi", "quad", "oct"]
Convolution = Literal["none", "causal_1d", "1d", "2d"]
Form = Literal["chunkwise", "parallel", "recurrent"]


@dataclass(frozen=True)
class MlstmOptions:
    """`directions`: how many traversals the blocks take in turn (Figure 4). `concurrency`: "parallel" blocks hold two
    branches with two traversals (Equation 15), so half the depth costs the same. `conv` in front of queries and keys.

    `expansion`: the inner width as a multiple of the channels; `heads` and `block` (of the query, key and value
    projections) shrink where they do not divide it. `class_tokens`: visited spread out (one in the middle, two at the
    ends, three at both) or all at the start. `form` and `chunk` say how the cell is computed, not what. `bias` is the
    model's own unless given; the gates always have theirs.
    """

    directions: Directions = "bi"
    concurrency: Literal["sequential", "parallel"] = "sequential"
    conv: Convolution = "2d"
    kernel: int = 3
    expansion: float = 2.0
    heads: int = 4
    block: int = 4
    class_tokens: Literal["spread", "start"] = "spread"
    form: Form = field(default="chunkwise", compare=False)
    chunk: int | None = field(default=None, compare=False)
    bias: bool | None = None

    def __post_init__(self) -> None:
        require(self.expansion > 0, f"an expansion above 0; got {self.expansion}.")
        require(min(self.heads, self.block) >= 1, f"heads and block of 1 or more; got {self}.")
        require(self.kernel >= 1, f"a kernel of 1 or more; got {self.kernel}.")
        odd = self.kernel % 2 == 1 or self.conv in ("none", "causal_1d")
        require(odd, f"an odd kernel for conv {self.conv!r}; got {self.kernel}.")
        require(self.chunk is None or self.chunk >= 1, f"a chunk of 1 step or more; got {self.chunk}.")


class Path(NamedTuple):
    """One way over the grid: row by row from the top left, or column by column, mirrored left to right, backwards.

    Tokens are put in the order of the walk in front of the layer and back behind it, where they are narrowest; inside,
    every walk is the same code.
    """

    columns: bool = False
    mirrored: bool = False
    backwards: bool = False

    def __str__(self) -> str:
        corner = {False: ("top left", "bottom right"), True: ("top right", "bottom left")}
        return f"{'columns' if self.columns else 'rows'} from {corner[self.mirrored][self.backwards]}"

    def arrange(self, tokens: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
        """Tokens in the order of the walk, and the grid that the image then lies on."""
        if not any(self):
            return tokens, grid
        image = grid.pixels(tokens)
        image = image.flip(2) if self.mirrored else image
        image = image.transpose(1, 2) if self.columns else image
        walk = Grid(image.shape[1], image.shape[2], grid.prefix)
        image = image.flatten(1, 2)
        image = image.flip(1) if self.backwards else image
        return behind_prefix(tokens, image, grid, backwards=self.backwards), walk

    def restore(self, tokens: Tensor, walk: Grid) -> Tensor:
        """The inverse of `arrange`."""
        if not any(self):
            return tokens
        image = walk.image(tokens)
        image = (image.flip(1) if self.backwards else image).unflatten(1, (walk.height, walk.width))
        image = image.transpose(1, 2) if self.columns else image
        image = image.flip(2) if self.mirrored else image
        return behind_prefix(tokens, image.flatten(1, 2), walk, backwards=self.backwards)


def behind_prefix(tokens: Tensor, image: Tensor, grid: Grid, *, backwards: bool = False) -> Tensor:
    """New image tokens behind the class tokens that are there, or behind these in the order of a walk backwards."""
    if not grid.prefix:
        return image
    prefix = tokens[:, : grid.prefix]
    return torch.cat([prefix.flip(1) if backwards else prefix, image], 1)


ROWS, COLUMNS = Path(), Path(columns=True)
BACKWARDS = Path(backwards=True)
MIRRORED = (Path(mirrored=True), Path(columns=True, mirrored=True))
STARTS: dict[Directions, tuple[Path, ...]] = {
    "uni": (ROWS,),
    "bi": (ROWS,),
    "quad": (ROWS, COLUMNS),
    "oct": (ROWS, COLUMNS, *MIRRORED),
}


def paths(directions: Directions) -> list[Path]:
    """The traversals of Figure 4 in the order in which blocks take them: each way, then the same backwards."""
    ways = (False,) if directions == "uni" else (False, True)
    return [path._replace(backwards=backwards) for path in STARTS[directions] for backwards in ways]


class BlockDiagonal(nn.Module):
    """The parameters of a linear layer that mixes channels within blocks."""

    def __init__(self, channels: int, block: int, *, bias: bool, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels // block, block, block).normal_(std=std))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None


class Ready(NamedTuple):
    """The weights of a cell as products want them: dense ones for queries, keys and values, those of all gates for the
    two sources, and the gates' biases.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    source_gates: Tensor
    value_gates: Tensor
    bias: Tensor


class Mlstm(Mixer):
    """Up-projection, convolution, cell, norm per head, skip, gate, down-projection (Figure 2, right)."""

    outruns_compilers = True
    mixes_channels = True
    mixes_class_tokens = True
    initializes_itself = True
    explains = ("input_gate", "forget_gate", "decay")
    linears = ("up", "gate", "down")

    def __init__(self, dim: int, options: MlstmOptions, path: Path) -> None:
        super().__init__()
        inner = max(1, int(options.expansion * dim))
        heads = divisor_of(inner, options.heads)
        block, bias = divisor_of(inner // heads, options.block), bool(options.bias)
        self.path, self.heads, self.form, self.chunk = path, heads, options.form, options.chunk
        self.direction = str(path)
        self.spread = options.class_tokens == "spread"
        self.causal = options.conv == "causal_1d"
        self.up = nn.Linear(dim, inner, bias=bias)
        self.gate = nn.Linear(dim, inner, bias=bias)
        kernel = (options.kernel, options.kernel) if options.conv == "2d" else (1, options.kernel)
        padding = (0, 0) if self.causal else (kernel[0] // 2, kernel[1] // 2)
        convolution = nn.Conv2d(inner, inner, kernel, padding=padding, groups=inner, bias=bias)
        self.conv = None if options.conv == "none" else convolution
        std = (2 / (5 * dim)) ** 0.5
        self.query = BlockDiagonal(inner, block, bias=bias, std=std)
        self.key = BlockDiagonal(inner, block, bias=bias, std=std)
        self.value = BlockDiagonal(inner, block, bias=bias, std=std)
        self.input_gate = nn.Linear(3 * inner, heads)
        self.forget_gate = nn.Linear(3 * inner, heads)
        self.norm = HeadNorm(inner, heads, bias=bias)
        self.skip = nn.Parameter(torch.ones(inner))
        self.down = nn.Linear(inner, dim, bias=bias)
        self.initialize(dim, std)

    def initialize(self, dim: int, std: float) -> None:
        nn.init.normal_(self.up.weight, std=std)
        nn.init.normal_(self.gate.weight, std=std)
        nn.init.normal_(self.down.weight, std=2 / dim**0.5)
        for layer in (self.up, self.gate, self.down, self.conv):
            if layer is not None and layer.bias is not None:
                nn.init.zeros_(layer.bias)
        nn.init.zeros_(self.input_gate.weight)
        nn.init.normal_(self.input_gate.bias, std=0.1)
        nn.init.zeros_(self.forget_gate.weight)
        with torch.no_grad():
            self.forget_gate.bias.copy_(torch.linspace(3, 6, self.heads))

    @property
    def last_layer(self) -> nn.Linear:
        return self.down

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        from_end = self.may_turn(tokens, grid)
        tokens, walk = (tokens, grid) if from_end else self.path.arrange(tokens, grid)
        value_source, gate = through(self.up, tokens), linear_for_fusion(self.gate, tokens)  # (B, T, inner)
        packed = self.packed_for(value_source, gate, walk)
        if packed is not None:
            source = self.source_by_kernel(value_source, walk, from_end=from_end)
            norm = Norm(*weights_of(self.norm), self.norm.eps)
            inputs = (source, value_source, gate, packed, norm, self.skip)
            merged = run_mlstm(*inputs, eps=EPS, chunk=self.chunk, backwards=from_end)
            return through(self.down, merged) if from_end else self.path.restore(through(self.down, merged), walk)
        if from_end:
            (value_source, walk), (gate, _) = (self.path.arrange(one, grid) for one in (value_source, gate))
        source = self.convolve(value_source, walk)
        source = F.silu(source, inplace=not torch.is_grad_enabled() and self.conv is not None and is_plain(self.conv))
        if self.may_call_kernel(source, value_source, gate, walk):
            about = (*self.make_packed(), *weights_of(self.norm), self.skip, EPS, self.norm.eps, self.chunk or 0)
            merged = compiled_mlstm(source, value_source, gate, *about)
        else:
            merged = self.merge(self.norm(self.cell(source, value_source, walk)), source, gate)
        return self.path.restore(linear_for_fusion(self.down, merged), walk)

    def may_turn(self, tokens: Tensor, grid: Grid) -> bool:
        """Whether tokens can stay as they are, because kernels walk backwards and nobody looks at what layers give."""
        if self.path != BACKWARDS or grid.prefix or self.form != "chunkwise" or torch.is_grad_enabled():
            return False
        return all(map(is_plain, (self.up, self.gate, self.down))) and may_run(tokens)

    def packed_for(self, value_source: Tensor, gate: Tensor, walk: Grid) -> Packed | None:
        """The cell's weights for the kernels, if these may do all that lies between the linear layers."""
        fits = self.form == "chunkwise" and not (walk.prefix and (self.spread or self.conv is not None))
        fits = fits and is_own_norm(self.norm) and (self.conv is None or is_depthwise(self.conv))
        if not fits:
            return None
        around = (*weights_of(self.norm), self.skip, *(weights_of(self.conv) if self.conv is not None else ()))
        if not (may_run(value_source, gate, *around) and all(one is None or one.is_contiguous() for one in around)):
            return None
        sources = self.sources()
        width = len(self.skip) // self.heads
        fits = self.query.weight.shape[1] == BLOCK and width % WIDTH == 0
        return self.packed() if fits and may_run(*sources) else None

    def may_call_kernel(self, source: Tensor, value_source: Tensor, gate: Tensor, walk: Grid) -> bool:
        """Whether compiled code may call the kernel: for inference by this process, on a CPU."""
        tells = hasattr(torch.compiler, "is_exporting")  # else a graph for other programs may be in the making
        if not torch.compiler.is_compiling() or torch.is_grad_enabled() or not tells or is_exported():
            return False
        width = source.shape[-1] // self.heads
        fits = self.form == "chunkwise" and self.query.weight.shape[1] == BLOCK and width % WIDTH == 0
        if not fits or (walk.prefix and self.spread) or not is_own_norm(self.norm):
            return False
        tensors = (source, value_source, gate, self.skip, *weights_of(self.norm), *self.sources())
        plain = all(one is None or (one.device.type == "cpu" and one.dtype is torch.float32) for one in tensors)
        return plain and HAS_TAGS and has_kernels()

    def source_by_kernel(self, value_source: Tensor, walk: Grid, *, from_end: bool) -> Tensor:
        """silu(convolution), both in one pass."""
        if self.conv is None:
            return F.silu(value_source)
        height, width = self.conv.kernel_size
        image = value_source.unflatten(1, (walk.height, walk.width) if height > 1 else (1, walk.image_tokens))
        padding = (height // 2, width - 1 if self.causal else width // 2)
        return convolve_channels(image, *weights_of(self.conv), padding, "silu", turned=from_end).flatten(1, 2)

    def convolve(self, inner: Tensor, walk: Grid) -> Tensor:
        """The depthwise convolution over image tokens; it looks along the walk, and class tokens pass."""
        if self.conv is None:
            return inner
        height, width = self.conv.kernel_size
        image = walk.to_map(inner) if height > 1 else Grid(1, walk.image_tokens, walk.prefix).to_map(inner)
        image = F.pad(image, (width - 1, 0)) if self.causal else image
        return behind_prefix(inner, walk.from_map(self.conv(image)), walk)

    def sources(self) -> list[Tensor]:
        """The weights of the cell."""
        layers = (self.query, self.key, self.value, self.input_gate, self.forget_gate)
        return [one for layer in layers for one in weights_of(layer) if one is not None]

    def ready(self) -> Ready:
        """The weights of the cell as they are used. In eval mode they are made once, until one of them changes; a GPU
        would have to be waited for to tell.
        """
        with without_autocast(self.query.weight):
            return derived(self, ("ready",), self.sources(), self.make_ready, cheap=True)

    def packed(self) -> Packed:
        """The same for the kernel."""
        return derived(self, ("packed",), self.sources(), self.make_packed)

    @torch.no_grad()
    def make_packed(self) -> Packed:
        (of_source, of_values, bias), layers = self.gate_weights(), (self.query, self.key, self.value)
        gates = torch.stack([of_source, of_values], 1).unflatten(0, (2, self.heads)).transpose(0, 1)
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        return Packed(
            torch.stack([turned(layer.weight) for layer in layers]),
            torch.stack(biases) if biases else None,
            gates.contiguous(),
            bias.view(2, self.heads).t().contiguous(),
        )

    def make_ready(self) -> Ready:
        dense = [densify_heads(layer.weight, self.heads) for layer in (self.query, self.key, self.value)]
        return Ready(dense[0], dense[1], dense[2], *self.gate_weights())

    def gate_weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of both gates for the source and the value source, and their biases.

        Gates are linear in queries, keys and values, which are linear in the sources: both steps in one.
        """
        projections = (self.query, self.key, self.value)
        weight = torch.cat([self.input_gate.weight, self.forget_gate.weight])  # (2 * heads, 3 * inner)
        bias = torch.cat([self.input_gate.bias, self.forget_gate.bias])
        query, key, value = (
            torch.einsum("gbo,boi->gbi", part.unflatten(1, layer.weight.shape[:2]), layer.weight).flatten(1)
            for part, layer in zip(weight.chunk(3, 1), projections, strict=True)
        )
        if self.query.bias is not None and self.key.bias is not None and self.value.bias is not None:
            bias = torch.addmv(bias, weight, torch.cat([self.query.bias, self.key.bias, self.value.bias]))
        return query + key, value, bias

    def gates(
        self, source: Tensor, value_source: Tensor, source_gates: Tensor, value_gates: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Pre-activations of input and forget gate, each (heads, B, T) in float32."""
        with without_autocast(source):
            flat, value_flat = (one.flatten(0, 1).to(bias.dtype) for one in (source, value_source))
            gates = torch.addmm(bias[:, None], source_gates, flat.t())
            gates = torch.addmm(gates, value_gates, value_flat.t()).unflatten(1, source.shape[:2])
        return gates[: self.heads], gates[self.heads :]

    def projected(self, source: Tensor, value_source: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, each (heads, B, T, D), and both gates."""
        parts = ((source, self.query), (source, self.key), (value_source, self.value))
        if all(may_train_heads(x, *weights_of(layer), self.heads) for x, layer in parts):
            made = [trained_heads(x, *weights_of(layer), self.heads) for x, layer in parts]
            return *made, *self.gates(source, value_source, *self.gate_weights())
        ready = self.ready()
        query = grouped_heads(source, ready.query, self.query.bias, self.heads)
        key = grouped_heads(source, ready.key, self.key.bias, self.heads)
        value = grouped_heads(value_source, ready.value, self.value.bias, self.heads)
        return query, key, value, *self.gates(source, value_source, *ready[3:])

    def counted(self, source: Tensor, value_source: Tensor) -> tuple[Tensor, ...]:
        """The same as it is written: without data, what the layer needs counts, not what is done for speed."""
        projections = ((source, self.query), (source, self.key), (value_source, self.value))
        parts = [block_diagonal(x, layer.weight, layer.bias) for x, layer in projections]
        gates = [F.linear(torch.cat(parts, 2), gate.weight, gate.bias) for gate in (self.input_gate, self.forget_gate)]
        heads = [part.unflatten(2, (self.heads, -1)).permute(2, 0, 1, 3) for part in parts]
        return *heads, *(gate.permute(2, 0, 1) for gate in gates)

    def cell(self, source: Tensor, value_source: Tensor, walk: Grid) -> Tensor:
        """The cell's output, (heads, B, T, D)."""
        inputs = (self.counted if source.is_meta else self.projected)(source, value_source)
        spread = self.spread and walk.prefix > 0
        query, key, value, write, keep = (to_visit(one, walk) for one in inputs) if spread else inputs
        if self.form == "chunkwise":
            output, _ = mlstm_chunkwise(query, key, value, write, keep, chunk=self.chunk)
        else:
            form = mlstm_parallel if self.form == "parallel" else mlstm_recurrent
            output, _ = form(query, key, value, write, keep)
        return from_visit(output, walk) if spread else output

    def merge(self, mixed: Tensor, source: Tensor, gate: Tensor) -> Tensor:
        """(mixed + skip * source) * silu(gate)"""
        if torch.is_grad_enabled() or not is_plain(self.norm):
            return torch.addcmul(mixed, source, self.skip) * F.silu(gate)
        return mixed.addcmul_(source, self.skip).mul_(F.silu(gate, inplace=is_plain(self.gate)))

    def explain(self, tokens: Tensor, grid: Grid) -> dict[str, Tensor]:
        """What is written and what is kept at every token, and how much is left at the end of the walk of what was
        written there; (B, heads, N), between 0 and 1 but for the input gate, which has no upper bound.
        """
        walk_tokens, walk = self.path.arrange(tokens, grid)
        value_source = through(self.up, walk_tokens)
        source = F.silu(self.convolve(value_source, walk))
        write, keep = self.gates(source, value_source, *self.ready()[3:])  # (heads, B, T)
        shown = (write.exp(), keep.sigmoid(), self.left_at_the_end(keep, walk))
        placed = (self.path.restore(gate.permute(1, 2, 0), walk).transpose(1, 2) for gate in shown)
        return dict(zip(self.explains, placed, strict=True))

    def left_at_the_end(self, keep: Tensor, walk: Grid) -> Tensor:
        """The product of the forget gates behind every token, in the order in which the walk visits them."""
        spread = self.spread and walk.prefix > 0
        kept = F.logsigmoid(to_visit(keep, walk) if spread else keep)
        behind = F.pad(kept.flip(-1).cumsum(-1).flip(-1)[..., 1:], (0, 1))
        return (from_visit(behind, walk) if spread else behind).exp()


class HeadNorm(nn.Module):
    """A layer norm within each head, with a weight and bias per channel: (heads, B, T, D) in, (B, T, C) out."""

    def __init__(self, channels: int, heads: int, *, bias: bool, eps: float = 1e-5) -> None:
        super().__init__()
        self.heads, self.eps = heads, eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def forward(self, heads: Tensor) -> Tensor:
        width = heads.shape[-1]
        ones, zeros = heads.new_ones(width), heads.new_zeros(width)  # PyTorch is faster with them than without
        normed = F.layer_norm(heads, (width,), ones, zeros, self.eps).permute(1, 2, 0, 3)  # (B, T, heads, D)
        weight = self.weight.view(self.heads, -1)
        plain = normed.dtype is weight.dtype and not (torch.is_grad_enabled() or is_transformed())
        place = normed.new_empty(normed.shape) if plain else None  # else it lies in the order of the heads
        if self.bias is None:
            return torch.mul(normed, weight, out=place).flatten(2)
        return torch.addcmul(self.bias.view(self.heads, -1), normed, weight, out=place).flatten(2)


def is_own_norm(norm: nn.Module) -> bool:
    """Whether a norm is what its parameters say, and nobody listens to it."""
    return type(norm) is HeadNorm and is_plain(norm)


def places(grid: Grid) -> list[int]:
    """How many image tokens a walk has seen in front of each class token: these are spread evenly over it."""
    count, image = grid.prefix, grid.image_tokens
    return [image // 2] if count == 1 else [round(index * image / (count - 1)) for index in range(count)]


def to_visit(sequence: Tensor, grid: Grid) -> Tensor:
    """(heads, B, T, ...) with the class tokens in front as (heads, B, T, ...) with them in their places."""
    image, pieces = sequence[:, :, grid.prefix :], []
    for index, (start, end) in enumerate(itertools.pairwise([0, *places(grid)])):
        pieces += [image[:, :, start:end], sequence[:, :, index : index + 1]]
    return torch.cat([*pieces, image[:, :, places(grid)[-1] :]], 2)


def from_visit(sequence: Tensor, grid: Grid) -> Tensor:
    """The inverse of `to_visit`."""
    tokens, image = [], []
    for index, (start, end) in enumerate(itertools.pairwise([0, *places(grid)])):
        image.append(sequence[:, :, start + index : end + index])
        tokens.append(sequence[:, :, end + index : end + index + 1])
    return torch.cat([*tokens, *image, sequence[:, :, places(grid)[-1] + grid.prefix :]], 2)


def divisor_of(number: int, at_most: int) -> int:
    """The largest divisor up to a wanted one."""
    return next(divisor for divisor in range(min(at_most, number), 0, -1) if number % divisor == 0)


@MIXERS.register("mlstm", MlstmOptions)
def build_stage(options: MlstmOptions, dim: int, depth: int, reference_grid: Grid) -> StageParts:
    walks = itertools.cycle(paths(options.directions))
    if options.concurrency == "parallel":
        pairs = [[Mlstm(dim, options, next(walks)) for _ in range(2)] for _ in range(depth)]
        return StageParts([BlockParts(pair) for pair in pairs])
    return StageParts([BlockParts([Mlstm(dim, options, next(walks))]) for _ in range(depth)], blocks_per_layer=2)
