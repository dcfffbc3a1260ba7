"""Attention over the whole grid and over a sliding window. Queries, keys, values: (B, heads, N, head_dim).

On a CPU our own kernel takes 0.4 to 0.65 of the time of `F.scaled_dot_product_attention`, forwards and back, since it
reads and writes where the linear layers do.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mixlab.core.grid import Grid
from mixlab.ops.operator import Flat, Operator, gradients_of


def attention(qkv: Tensor, heads: int, offset: Tensor | None = None) -> Tensor:
    """`attention_reference` by a kernel where one serves, or with an offset (heads, N, N) added to the scores."""
    return ATTENTION(qkv, heads) if offset is None else fused_attention(qkv, heads, offset)


def fused_attention(qkv: Tensor, heads: int, offset: Tensor | None = None) -> Tensor:
    """The same by PyTorch's own fused operator."""
    return join_heads(F.scaled_dot_product_attention(*split_heads(qkv, heads), attn_mask=offset))


def attention_reference(qkv: Tensor, heads: int) -> Tensor:
    """softmax(q k^T / sqrt(d)) v of (B, N, 3 * heads * head_dim) as (B, N, heads * head_dim)."""
    query, key, value = split_heads(qkv, heads)
    return join_heads(attention_weights(query, key) @ value)


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of (B, N, 3 * heads * head_dim), each (B, heads, N, head_dim)."""
    query, key, value = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return query, key, value


def join_heads(mixed: Tensor) -> Tensor:
    """(B, heads, N, head_dim) -> (B, N, heads * head_dim)"""
    return mixed.transpose(1, 2).flatten(2)


def attention_gradient(gradients: list[Tensor], inputs: Flat, needed: list[bool], heads: int) -> Flat:
    """By operators that can be differentiated again, which PyTorch's fused one cannot."""
    return gradients_of(lambda qkv: attention_reference(qkv, heads), inputs, needed, gradients)


ATTENTION = Operator(
    "attention", fused_attention, inputs="Tensor qkv", settings="int heads", gradient=attention_gradient
)


def attention_weights(query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d)) over the keys that a mask leaves, or with an offset added, (B, heads, N, N)."""
    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
    return scores.softmax(-1)


def window_mask(grid: Grid, window: int, device: torch.device) -> Tensor:
    """(N, N), true where a query sees a key: at most window // 2 rows and columns apart, or a class token."""
    rows = torch.arange(grid.height, device=device).repeat_interleave(grid.width)
    columns = torch.arange(grid.width, device=device).repeat(grid.height)
    near = ((rows[:, None] - rows).abs() <= window // 2) & ((columns[:, None] - columns).abs() <= window // 2)
    return F.pad(near, (grid.prefix, 0, grid.prefix, 0), value=True)


def window_attention_reference(query: Tensor, key: Tensor, value: Tensor, grid: Grid, window: int) -> Tensor:
    """Each image token attends to the window around it and to the class tokens; class tokens to everything."""
    mask = window_mask(grid, window, query.device)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def offsets_between(table: Tensor, grid: Grid) -> Tensor:
    """Entries of (heads, 2H - 1, 2W - 1) for the offset of every query from every key, (heads, H*W, H*W)."""
    rows = torch.arange(grid.height, device=table.device)
    columns = torch.arange(grid.width, device=table.device)
    down = (rows[:, None] - rows[None] + grid.height - 1)[:, None, :, None]  # (H, 1, H, 1)
    right = (columns[:, None] - columns[None] + grid.width - 1)[None, :, None, :]
    return table[:, down, right].flatten(3, 4).flatten(1, 2)


def window_attention(query: Tensor, key: Tensor, value: Tensor, grid: Grid, window: int) -> Tensor:
    """`window_attention_reference` by tiles where that needs fewer scores: in memory linear in the number of tokens.

    Queries are cut into square tiles; the keys of a tile are the tile and half a window around it.
    """
    if query.is_meta:
        return window_attention_shape(query, key, value, grid, window)
    reach, tile = window // 2, (window + 1) // 2
    if reach >= max(grid.height, grid.width) - 1:
        return F.scaled_dot_product_attention(query, key, value)
    tiles = Grid(-(-grid.height // tile), -(-grid.width // tile))
    if tiles.image_tokens * tile**2 * (tile + 2 * reach) ** 2 >= grid.image_tokens**2:
        return window_attention_reference(query, key, value, grid, window)
    queries = cut_tiles(query, grid, tile, 0)
    keys, values = cut_tiles(key, grid, tile, reach), cut_tiles(value, grid, tile, reach)
    mask = tile_mask(grid, tiles, tile, reach, query.device)[:, None]  # for all images and heads
    if grid.prefix:
        keys = torch.cat([prefix_of(key, grid, tiles), keys], 2)
        values = torch.cat([prefix_of(value, grid, tiles), values], 2)
        mask = F.pad(mask, (grid.prefix, 0), value=True)
    mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    image = join_tiles(mixed, grid, tiles, tile, query.shape[:2])
    if not grid.prefix:
        return image
    return torch.cat([F.scaled_dot_product_attention(query[:, :, : grid.prefix], key, value), image], 2)


def window_attention_shape(query: Tensor, key: Tensor, value: Tensor, grid: Grid, window: int) -> Tensor:
    """Window attention without data, for counting: each query meets as many keys as its window has, and no tiles.

    Windows at the border of the image count in full, as they do in MetaFormer's Table 9.
    """
    seen = min(window, grid.height) * min(window, grid.width) + grid.prefix
    image = F.scaled_dot_product_attention(query[:, :, grid.prefix :], key[:, :, :seen], value[:, :, :seen])
    if not grid.prefix:
        return image
    return torch.cat([F.scaled_dot_product_attention(query[:, :, : grid.prefix], key, value), image], 2)


def cut_tiles(tokens: Tensor, grid: Grid, tile: int, reach: int) -> Tensor:
    """(B, heads, N, D) -> (tiles, B * heads, (tile + 2 reach)^2, D), zeros beyond the border."""
    image = tokens[:, :, grid.prefix :].flatten(0, 1).unflatten(1, (grid.height, grid.width))
    bottom, right = -grid.height % tile, -grid.width % tile
    image = F.pad(image, (0, 0, reach, reach + right, reach, reach + bottom))
    size = tile + 2 * reach
    tiles = image.unfold(1, size, tile).unfold(2, size, tile)  # (B * heads, rows, columns, D, size, size)
    return tiles.permute(1, 2, 0, 4, 5, 3).flatten(3, 4).flatten(0, 1)


def join_tiles(tiles: Tensor, grid: Grid, layout: Grid, tile: int, lead: torch.Size) -> Tensor:
    """The inverse of `cut_tiles` for queries of `lead`, images and heads; padding is cropped."""
    image = tiles.unflatten(0, (layout.height, layout.width)).unflatten(3, (tile, tile))
    image = image.permute(2, 0, 3, 1, 4, 5).flatten(3, 4).flatten(1, 2)  # (B * heads, H, W, D) with padding
    return image[:, : grid.height, : grid.width].flatten(1, 2).unflatten(0, lead)


def tile_mask(grid: Grid, tiles: Grid, tile: int, reach: int, device: torch.device) -> Tensor:
    """(tiles, tile^2, (tile + 2 reach)^2): which keys around a tile each of its queries sees."""
    rows = axis_mask(grid.height, tiles.height, tile, reach, device)
    columns = axis_mask(grid.width, tiles.width, tile, reach, device)
    mask = rows[:, None, :, None, :, None] & columns[None, :, None, :, None, :]
    return mask.flatten(4, 5).flatten(2, 3).flatten(0, 1)


def axis_mask(length: int, tiles: int, tile: int, reach: int, device: torch.device) -> Tensor:
    """(tiles, tile, keys) along one axis: near enough and inside the image.

    A query beyond the border may have no key inside; it sees itself, so that its softmax exists. It is cropped later.
    """
    query = torch.arange(tile, device=device)[:, None]
    key = torch.arange(tile + 2 * reach, device=device)[None] - reach
    start = torch.arange(tiles, device=device)[:, None, None] * tile
    inside = (start + key >= 0) & (start + key < length)
    return ((query - key).abs() <= reach) & (inside | (query == key))


def prefix_of(tokens: Tensor, grid: Grid, tiles: Grid) -> Tensor:
    """The class tokens once per tile, (tiles, B * heads, prefix, D)."""
    return tokens[:, :, : grid.prefix].flatten(0, 1).expand(tiles.image_tokens, -1, -1, -1)
