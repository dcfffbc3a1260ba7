"""The weather of ImageNet-C, and spatter: snow, frost, fog, drops of water and mud. See `corruptions.py`."""

from collections.abc import Sequence

import numpy as np

from mixlab.ops.corruptions import LUMA, WHITE, Array, Random, enlarge, scipy, smooth, streaks

WATER, MUD = (175, 238, 238), (63, 42, 20)  # pale turquoise and brown, of 255
RIM = 20  # pixels from the rim of a drop after which its relief is flat
RELIEF = ((-2, -1, 0), (-1, 1, 1), (0, 1, 2))
MUD_FLOOR = 0.8  # thinner mud is not seen
FROST_TINT = (0.86, 0.95, 1.0)
CRYSTAL, BARB = 80.0, 10.0  # pixels of a frost crystal and between its barbs, at zoom 1
FROST_MEAN, FROST_DEVIATION = 0.48, 0.2


def fog(pixels: Array, random: Random, *, strength: float, decay: float) -> Array:
    height, width = pixels.shape[:2]
    side = 1 << (max(height, width) - 1).bit_length()
    white = pixels.max()
    return (pixels + strength * plasma(side, decay, random)[:height, :width, None]) * white / (white + strength)


def plasma(side: int, decay: float, random: Random) -> Array:
    """Heights from 0 to 1, (side, side), by the diamond-square algorithm on a torus; `side` is a power of two.

    The deviation shrinks by the square of `decay` at each halving, as in the published code.
    """
    heights = np.zeros((side, side))
    step, deviation = side, 1.0
    while step >= 2:
        half = step // 2
        corners, centres = heights[::step, ::step], heights[half::step, half::step]

        def about(total: Array, deviation: float = deviation) -> Array:
            return total / 4 + deviation * random.uniform(-1, 1, size=total.shape)

        pairs = corners + np.roll(corners, -1, axis=0)
        centres[:] = about(pairs + np.roll(pairs, -1, axis=1))
        heights[::step, half::step] = about(
            centres + np.roll(centres, 1, axis=0) + corners + np.roll(corners, -1, axis=1)
        )
        heights[half::step, ::step] = about(
            centres + np.roll(centres, 1, axis=1) + corners + np.roll(corners, -1, axis=0)
        )
        step, deviation = half, deviation / decay**2
    heights -= heights.min()
    return heights / heights.max()


# -- frost ---------------------------------------------------------------------------------------


def frost(pixels: Array, random: Random, *, keep: float, ice: float, zoom: float) -> Array:
    texture = frost_texture(pixels.shape[0], pixels.shape[1], zoom, random)[..., None]
    return keep * pixels + ice * texture * tint(FROST_TINT, pixels.shape[-1])


def frost_texture(height: int, width: int, zoom: float, random: Random) -> Array:
    """Feathery crystals of ice on a window, (H, W) from 0 to 1; the mean and the deviation are fixed.

    Each crystal grows from a seed in a direction of its own: a bright spine with barbs at 60 degrees on both sides.
    """
    spatial = scipy("spatial")
    side = 1 << (max(height, width) - 1).bit_length()
    clouds = [plasma(side, decay, random)[:height, :width] for decay in (1.29, 1.29, 1.5)]
    rows, columns = np.mgrid[:height, :width].astype(np.float64)
    rows, columns = rows + 40 * zoom * clouds[0], columns + 40 * zoom * clouds[1]  # nothing in ice is straight
    crystal = CRYSTAL * zoom
    count = max(4, round(2 * (height + crystal) * (width + crystal) / crystal**2))
    seeds = random.uniform(-crystal / 2, np.array([height, width]) + crystal, size=(count, 2))
    turns, widths = random.uniform(0, 2 * np.pi, size=count), random.uniform(0.6, 1.6, size=count)
    distances, nearest = spatial.cKDTree(seeds).query(np.stack([rows, columns], axis=-1), k=2)
    own = nearest[..., 0]
    down, across = rows - seeds[own, 0], columns - seeds[own, 1]
    along = down * np.sin(turns[own]) + across * np.cos(turns[own])
    beside = np.abs(down * np.cos(turns[own]) - across * np.sin(turns[own]))
    phase = (along - beside / np.sqrt(3)) / (BARB * zoom * widths[own])
    barbs = sum((1 - np.abs(np.sin(np.pi * scale * phase))) ** 2 / scale for scale in (1, 2.3, 5.1))
    fading = np.exp(-distances[..., 0] / crystal)
    spine, seam = np.exp(-beside / (2 * zoom)), np.exp(-(distances[..., 1] - distances[..., 0]) / (3 * zoom))
    grain = smooth(random.normal(size=(height, width)), 0.7)
    heights = fading * (0.8 * barbs + 0.8 * spine) + 0.2 * seam + 1.7 * clouds[2] + 0.12 * grain
    heights = (heights - heights.mean()) / max(float(heights.std()), 1e-9)
    return (FROST_MEAN + FROST_DEVIATION * heights).clip(0, 1)


def tint(colour: Sequence[float], channels: int) -> Array:
    """A colour for the channels that there are: grey takes its luma."""
    return np.array(colour) if channels == len(colour) else np.array([np.dot(LUMA, colour)])


# -- snow ----------------------------------------------------------------------------------------


def snow(
    pixels: Array,
    random: Random,
    *,
    mean: float,
    deviation: float,
    zoom: float,
    threshold: float,
    radius: float,
    streak: float,
    keep: float,
) -> Array:
    """Flakes driven by the wind, on a scene that is whitened."""
    flakes = enlarge(random.normal(mean, deviation, size=(*pixels.shape[:2], 1)), zoom)
    flakes = np.where(flakes < threshold, 0, flakes).clip(0, 1)
    flakes = streaks(flakes, radius, streak, random.uniform(-135, -45))
    grey = pixels @ np.array(LUMA)[:, None] if pixels.shape[-1] == 3 else pixels
    whitened = keep * pixels + (1 - keep) * np.maximum(pixels, 1.5 * grey + 0.5)
    return whitened + flakes + flakes[::-1, ::-1]


# -- spatter -------------------------------------------------------------------------------------


def spatter(
    pixels: Array,
    random: Random,
    *,
    mean: float,
    deviation: float,
    smoothness: float,
    threshold: float,
    strength: float,
    mud: bool,
) -> Array:
    """Drops of water (`strength`: how bright) or of mud (how far it spreads)."""
    liquid = smooth(random.normal(mean, deviation, size=pixels.shape[:2]), smoothness)
    liquid = np.where(liquid < threshold, 0, liquid)
    if not liquid.any():
        return pixels
    if mud:
        cover = smooth((liquid > threshold).astype(np.float64), strength)[..., None]
        cover = np.where(cover < MUD_FLOOR, 0, cover)
        return pixels * (1 - cover) + cover * tint(MUD, pixels.shape[-1]) / WHITE
    shine = liquid * relief(liquid > 0)
    shine *= strength / max(float(shine.max()), 1e-9)
    return pixels + shine[..., None] * tint(WATER, pixels.shape[-1]) / WHITE


def relief(drops: Array) -> Array:
    """Drops lit from one side: an emboss of the distance to their rims, (H, W)."""
    ndimage = scipy("ndimage")
    rims = drops & ~ndimage.binary_erosion(drops, border_value=1)
    if not rims.any():  # one drop covers everything
        return np.ones(drops.shape)
    distance = np.minimum(ndimage.distance_transform_edt(~rims), RIM)
    levels = equalised(ndimage.uniform_filter(distance, 3, mode="mirror").astype(np.uint8))
    lit = ndimage.correlate(levels.astype(np.float64), np.array(RELIEF), mode="mirror").clip(0, WHITE)
    return ndimage.uniform_filter(lit, 3, mode="mirror")


def equalised(levels: Array) -> Array:
    """Levels from 0 to 255, so that each range of them is equally frequent."""
    counts = np.bincount(levels.ravel(), minlength=WHITE + 1)
    below = counts.cumsum()
    first = below[np.flatnonzero(counts)[0]]
    if first == levels.size:
        return levels
    return np.rint((below - first).clip(0) * (WHITE / (levels.size - first))).astype(np.uint8)[levels]
