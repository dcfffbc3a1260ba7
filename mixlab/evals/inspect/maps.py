"""What mixers show about themselves, as maps over the image: attention, gates, memory decay; and feature maps."""

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn

from mixlab.core.errors import ConfigError, near_misses, require
from mixlab.core.grid import Grid
from mixlab.evals.inspect.kernels import stage_of
from mixlab.evals.subjects import Subject, backbone_of
from mixlab.models.backbone import Backbone

ATTENTION = ("attention", "matrix", "query_factor")  # words of which each is enough for attention maps
GATES = ("input_gate", "forget_gate", "decay")
Place = tuple[float, float]  # from the top and from the left, as shares of the image
Source = Subject | nn.Module


def attention_maps(
    source: Source, images: Tensor, *, blocks: Sequence[str] | None = None, query: Place | None = None
) -> dict[str, Tensor]:
    """Where each block's query looks, (B, heads, H, W) per block on its own grid.

    The query is the mean of the class tokens where a block has any, else the token in the center; `query` names another
    place. Softmax attention adds up to 1 over the map and the class tokens. Factorised attention (CoaT, section 7) does
    not and may be negative. Random mixing has one head and is the same for every image.
    """
    model = backbone_of(source, "attention")
    check_place(query)
    found = {}
    for name, shown, grid in explained(model, images, ATTENTION, blocks, "attention"):
        for branch, words in branches(shown, ATTENTION):
            over = Grid(grid.height, grid.width) if "matrix" in words else grid  # random mixing leaves class tokens out
            rows = attention_rows(words, query_rows(over, query), len(images))
            found[name + branch] = rows[..., over.prefix :].unflatten(-1, (grid.height, grid.width))
    return found


def attention_rows(words: dict[str, Tensor], rows: slice, batch: int) -> Tensor:
    """The mean of some rows of the attention, (B, heads, N), without the other rows where these are not there yet."""
    if "query_factor" in words:
        queries = words["query_factor"][:, :, rows].mean(2, keepdim=True)
        return (queries @ words["key_factor"].mT)[:, :, 0]
    if "matrix" in words:
        return words["matrix"][rows].mean(0).expand(batch, 1, -1)
    return words["attention"][:, :, rows].mean(2)


def query_rows(grid: Grid, query: Place | None) -> slice:
    """Which tokens ask: the class tokens, or the one at a place."""
    if query is None and grid.prefix:
        return slice(0, grid.prefix)
    down, right = query or (0.5, 0.5)
    row, column = min(int(down * grid.height), grid.height - 1), min(int(right * grid.width), grid.width - 1)
    place = grid.prefix + row * grid.width + column
    return slice(place, place + 1)


def check_place(query: Place | None) -> None:
    if query is not None:
        inside = len(query) == 2 and all(0 <= share <= 1 for share in query)
        require(inside, f"a query as shares of height and width between 0 and 1, such as 0.5,0.5; got {query}.")


def gate_maps(source: Source, images: Tensor, *, blocks: Sequence[str] | None = None) -> dict[str, dict[str, Tensor]]:
    """Gates of every mLSTM block, (B, heads, H, W) in [0, 1] for each of three words.

    `input_gate`: how strongly a patch is written, relative to the strongest of the image (only ratios matter to the
    cell). `forget_gate`: how much of the memory is kept there. `decay`: how much is left at the end of the walk of what
    was written there. `directions` tells where the walk of each block starts.
    """
    model = backbone_of(source, "gates")
    found = {}
    for name, shown, grid in explained(model, images, GATES, blocks, "gates"):
        for branch, words in branches(shown, GATES):
            write = words["input_gate"]
            words = {**words, "input_gate": write / write.amax(-1, keepdim=True)}
            found[name + branch] = {
                word: words[word][..., grid.prefix :].unflatten(-1, (grid.height, grid.width)) for word in GATES
            }
    return found


def directions(source: Source) -> dict[str, str]:
    """Where the walk of each block with gates starts, under the names of `gate_maps`."""
    model = backbone_of(source, "gates")
    found = {}
    for name, mixers in model.token_mixers.items():
        for index, mixer in enumerate(mixers):
            if mixer.direction:
                found[name if len(mixers) == 1 else f"{name} ({index})"] = mixer.direction
    return found


def feature_maps(source: Subject, images: Tensor, name: str) -> Tensor:
    """The output of a named place, (B, C, H, W)."""
    source.check_intermediate(name)
    return source.intermediates(images, [name])[name].detach()


# -- what blocks explain -------------------------------------------------------------------------


def explained(
    model: Backbone, images: Tensor, words: Iterable[str], blocks: Sequence[str] | None, what: str
) -> Iterator[tuple[str, dict[str, Tensor], Grid]]:
    """What the blocks that know one of these words show, block by block, so that only one is in memory."""
    able = [name for name, known in model.explanations.items() if set(known) & set(words)]
    if not able:
        used = ", ".join(sorted({choice.name for choice in model.config.mixers}))
        raise ConfigError(f"No block of {model.config.name!r} has {what} to show: its mixers are {used}.")
    for block in blocks or ():
        if block not in able:
            raise ConfigError(f"{model.config.name!r} has no {what} at {block!r}. {near_misses(block, able)}")
    grids = model.grids(images.shape[2], images.shape[3])
    for name, shown in model.explain_each(images, able if blocks is None else blocks):
        yield name, shown, grids[stage_of(name)]


def branches(shown: dict[str, Tensor], words: Sequence[str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Parallel branches apart: {"decay.0": ..., "decay.1": ...} as (" (0)", {"decay": ...}), (" (1)", ...)."""
    for mark in sorted({name.partition(".")[2] for name in shown}):
        own = {name.partition(".")[0]: value for name, value in shown.items() if name.partition(".")[2] == mark}
        if set(own) & set(words):
            yield f" ({mark})" if mark else "", own
