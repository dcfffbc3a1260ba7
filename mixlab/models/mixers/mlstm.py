"""The mLSTM layer of Vision-LSTM: a matrix memory that walks over the patches, inside a gated projection."""

import itertools
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixlab.core.errors import require
from mixlab.core.grid import Grid
from mixlab.models.mixers.base import MIXERS, BlockParts, Mixer, StageParts
from mixlab.ops.layers import HeadNorm, through, through_mlstm
from mixlab.ops.mlstm_layer import CellWeights, Form, gates

Directions = Literal["uni", "bi", "quad", "oct"]
Convolution = Literal["none", "causal_1d", "1d", "2d"]


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
        tokens, walk = self.path.arrange(tokens, grid)
        values, gate = through(self.up, tokens), through(self.gate, tokens)  # (B, T, inner)
        source = F.silu(self.convolve(values, walk))
        if self.spread and walk.prefix:
            source, values, gate = (to_visit(x, walk) for x in (source, values, gate))
        parts = (source, values, gate, self.cell(), self.norm, self.skip)
        mixed = through(self.down, through_mlstm(*parts, form=self.form, chunk=self.chunk))
        return self.path.restore(from_visit(mixed, walk) if self.spread and walk.prefix else mixed, walk)

    def convolve(self, inner: Tensor, walk: Grid) -> Tensor:
        """The depthwise convolution over image tokens; it looks along the walk, and class tokens pass."""
        if self.conv is None:
            return inner
        height, width = self.conv.kernel_size
        image = walk.to_map(inner) if height > 1 else Grid(1, walk.image_tokens, walk.prefix).to_map(inner)
        image = F.pad(image, (width - 1, 0)) if self.causal else image
        return behind_prefix(inner, walk.from_map(self.conv(image)), walk)

    def cell(self) -> CellWeights:
        query, key, value = self.query, self.key, self.value
        gates = torch.cat([self.input_gate.weight, self.forget_gate.weight])  # (2 * heads, 3 * inner)
        biases = torch.cat([self.input_gate.bias, self.forget_gate.bias])
        projections = (query.weight, query.bias, key.weight, key.bias, value.weight, value.bias)
        return CellWeights(*projections, gates, biases)

    def explain(self, tokens: Tensor, grid: Grid) -> dict[str, Tensor]:
        """What is written and what is kept at every token, and how much is left at the end of the walk of what was
        written there; (B, heads, N), between 0 and 1 but for the input gate, which has no upper bound.
        """
        walk_tokens, walk = self.path.arrange(tokens, grid)
        values = through(self.up, walk_tokens)
        both = gates(F.silu(self.convolve(values, walk)), values, self.cell())
        write, keep = (gate.permute(1, 2, 0) for gate in both)  # (B, T, heads)
        shown = (write.exp(), keep.sigmoid(), self.left_at_the_end(keep, walk))
        placed = (self.path.restore(gate, walk).transpose(1, 2) for gate in shown)
        return dict(zip(self.explains, placed, strict=True))

    def left_at_the_end(self, keep: Tensor, walk: Grid) -> Tensor:
        """The product of the forget gates after every token, in the order in which the walk visits them."""
        spread = self.spread and walk.prefix > 0
        kept = F.logsigmoid(to_visit(keep, walk) if spread else keep)
        after = F.pad(kept.flip(1).cumsum(1).flip(1)[:, 1:], (0, 0, 0, 1))
        return (from_visit(after, walk) if spread else after).exp()


def places(grid: Grid) -> list[int]:
    """How many image tokens a walk has seen in front of each class token: these are spread evenly over it."""
    count, image = grid.prefix, grid.image_tokens
    return [image // 2] if count == 1 else [round(index * image / (count - 1)) for index in range(count)]


def to_visit(sequence: Tensor, grid: Grid) -> Tensor:
    """(B, T, ...) with the class tokens in front as (B, T, ...) with them in their places."""
    image, pieces = sequence[:, grid.prefix :], []
    for index, (start, end) in enumerate(itertools.pairwise([0, *places(grid)])):
        pieces += [image[:, start:end], sequence[:, index : index + 1]]
    return torch.cat([*pieces, image[:, places(grid)[-1] :]], 1)


def from_visit(sequence: Tensor, grid: Grid) -> Tensor:
    """The inverse of `to_visit`."""
    tokens, image = [], []
    for index, (start, end) in enumerate(itertools.pairwise([0, *places(grid)])):
        image.append(sequence[:, start + index : end + index])
        tokens.append(sequence[:, end + index : end + index + 1])
    return torch.cat([*tokens, *image, sequence[:, places(grid)[-1] + grid.prefix :]], 1)


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
