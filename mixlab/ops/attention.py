"""Attention over the whole grid and over a sliding window. Queries, keys, values: (B, heads, N, head_dim)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mixlab.grid import Grid


def attention_weights(query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d)) over the keys that the mask leaves, (B, heads, N, N)."""
    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    return (scores if mask is None else scores.masked_fill(~mask, float("-inf"))).softmax(-1)


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


def window_attention(query: Tensor, key: Tensor, value: Tensor, grid: Grid, window: int) -> Tensor:
    """`window_attention_reference` in memory linear in the number of tokens.

    Queries are cut into tiles of window x window; the keys of a tile are the tile and half a window around it.
    """
    reach = window // 2
    if reach >= max(grid.height, grid.width) - 1:
        return F.scaled_dot_product_attention(query, key, value)
    tiles = Grid(-(-grid.height // window), -(-grid.width // window))
    queries = cut_tiles(query, grid, window, 0)
    keys, values = cut_tiles(key, grid, window, reach), cut_tiles(value, grid, window, reach)
    mask = tile_mask(grid, tiles, window, query.device)
    if grid.prefix:
        keys = torch.cat([prefix_of(key, grid, tiles), keys], 2)
        values = torch.cat([prefix_of(value, grid, tiles), values], 2)
        mask = F.pad(mask, (grid.prefix, 0), value=True)
    mask = mask.repeat(len(query), 1, 1)[:, None]  # (B * tiles, 1, window^2, keys)
    mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    image = join_tiles(mixed, grid, tiles, window)
    if not grid.prefix:
        return image
    return torch.cat([F.scaled_dot_product_attention(query[:, :, : grid.prefix], key, value), image], 2)


def cut_tiles(tokens: Tensor, grid: Grid, window: int, reach: int) -> Tensor:
    """(B, heads, N, D) -> (B * tiles, heads, (window + 2 reach)^2, D), zeros beyond the border."""
    _batch, heads, _, dim = tokens.shape
    image = tokens[:, :, grid.prefix :].unflatten(2, (grid.height, grid.width))
    bottom, right = -grid.height % window, -grid.width % window
    image = F.pad(image, (0, 0, reach, reach + right, reach, reach + bottom))
    size = window + 2 * reach
    tiles = image.unfold(2, size, window).unfold(3, size, window)  # (B, heads, rows, columns, D, size, size)
    tiles = tiles.permute(0, 2, 3, 1, 5, 6, 4)  # (B, rows, columns, heads, size, size, D)
    return tiles.reshape(-1, heads, size * size, dim)


def join_tiles(tiles: Tensor, grid: Grid, layout: Grid, window: int) -> Tensor:
    """The inverse of `cut_tiles` for queries; padding is cropped."""
    heads, dim = tiles.shape[1], tiles.shape[3]
    image = tiles.reshape(-1, layout.height, layout.width, heads, window, window, dim)
    image = image.permute(0, 3, 1, 4, 2, 5, 6)  # (B, heads, rows, window, columns, window, D)
    image = image.reshape(-1, heads, layout.height * window, layout.width * window, dim)
    return image[:, :, : grid.height, : grid.width].flatten(2, 3)


def tile_mask(grid: Grid, tiles: Grid, window: int, device: torch.device) -> Tensor:
    """(tiles, window^2, (2 window - 1)^2): which keys around a tile each of its queries sees."""
    rows = axis_mask(grid.height, tiles.height, window, device)
    columns = axis_mask(grid.width, tiles.width, window, device)
    mask = rows[:, None, :, None, :, None] & columns[None, :, None, :, None, :]
    return mask.flatten(4, 5).flatten(2, 3).flatten(0, 1)


def axis_mask(length: int, tiles: int, window: int, device: torch.device) -> Tensor:
    """(tiles, window, keys) along one axis: near enough and inside the image.

    A query beyond the border has no key inside; it sees itself, so that its softmax exists. It is cropped later.
    """
    reach = window // 2
    query = torch.arange(window, device=device)[:, None]
    key = torch.arange(window + 2 * reach, device=device)[None] - reach
    start = torch.arange(tiles, device=device)[:, None, None] * window
    inside = (start + key >= 0) & (start + key < length)
    return ((query - key).abs() <= reach) & (inside | (query == key))


def prefix_of(tokens: Tensor, grid: Grid, tiles: Grid) -> Tensor:
    """The class tokens once per tile, (B * tiles, heads, prefix, D)."""
    return tokens[:, :, : grid.prefix].repeat_interleave(tiles.image_tokens, 0)
