"""Noise, blur and digital faults of ImageNet-C (Hendrycks and Dietterich, 2019) as functions of pixels.

Each takes pixels (H, W, C) from 0 to 1 with C = 1 or 3, the parameters of one severity by name and a generator, and
returns pixels of the same shape, which may lie outside 0 to 1: the caller clips. Weather is in `weather.py`.
"""

import importlib
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from mixlab.core.errors import MixlabError

Array = np.ndarray[Any, Any]
Random = np.random.Generator

WHITE = 255
SMALL_DISK = 8  # radii up to it share one size of the kernel
LUMA = (0.299, 0.587, 0.114)


def scipy(part: str) -> Any:
    """A part of scipy, or how to get it."""
    try:
        return importlib.import_module(f"scipy.{part}")
    except ImportError as error:
        raise MixlabError("Corruptions need scipy, which is not installed: pip install 'mixlab[data]'") from error


# -- noise ---------------------------------------------------------------------------------------


def gaussian_noise(pixels: Array, random: Random, *, deviation: float) -> Array:
    return pixels + random.normal(scale=deviation, size=pixels.shape)


def shot_noise(pixels: Array, random: Random, *, photons: float) -> Array:
    """`photons` is how many a white pixel counts on average."""
    return random.poisson(pixels * photons) / photons


def impulse_noise(pixels: Array, random: Random, *, share: float) -> Array:
    """Salt and pepper in equal parts, each channel for itself."""
    hit, salt = (np.less(random.random(pixels.shape), limit) for limit in (share, 0.5))
    return np.where(hit, np.where(salt, 1.0, 0.0), pixels)


def speckle_noise(pixels: Array, random: Random, *, deviation: float) -> Array:
    return pixels * (1 + random.normal(scale=deviation, size=pixels.shape))


# -- blur ----------------------------------------------------------------------------------------


def gaussian_blur(pixels: Array, random: Random, *, deviation: float) -> Array:
    return smooth(pixels, deviation)


def smooth(pixels: Array, deviation: float, *, mode: str = "nearest", truncate: float = 4.0) -> Array:
    """A Gaussian along the first two axes."""
    ndimage = scipy("ndimage")
    return ndimage.gaussian_filter(pixels, deviation, mode=mode, truncate=truncate, axes=(0, 1))


def defocus_blur(pixels: Array, random: Random, *, radius: float, soften: float) -> Array:
    """Every point becomes a disk, whose rim is softened."""
    signal = scipy("signal")
    kernel = disk(radius, soften)
    reach = len(kernel) // 2
    padded = np.pad(pixels, ((reach, reach), (reach, reach), (0, 0)), mode="reflect")
    return signal.oaconvolve(padded, kernel[..., None], mode="valid", axes=(0, 1))  # the disk is symmetric


def disk(radius: float, soften: float) -> Array:
    """A filled circle with the sum 1, blurred by a Gaussian of 3 x 3 taps (5 x 5 for large ones)."""
    ndimage = scipy("ndimage")
    small = radius <= SMALL_DISK
    side = np.arange(-SMALL_DISK, SMALL_DISK + 1) if small else np.arange(-radius, radius + 1)
    circle = (side[:, None] ** 2 + side**2 <= radius**2).astype(np.float64)
    taps = np.arange(-1, 2) if small else np.arange(-2, 3)
    bell = np.exp(-(taps**2) / (2 * soften**2))
    bell /= bell.sum()
    for axis in (0, 1):
        circle = ndimage.correlate1d(circle, bell, axis=axis, mode="mirror")
    return circle / circle.sum()


def glass_blur(pixels: Array, random: Random, *, deviation: float, reach: int, rounds: int) -> Array:
    """Blur, displace each pixel within its surroundings, blur again."""
    blurred = smooth(pixels, deviation)
    height, width, channels = pixels.shape
    flat = blurred.reshape(-1, channels)
    for _ in range(rounds):
        flat = flat[displaced(height, width, reach, random)]
    return smooth(flat.reshape(pixels.shape), deviation)


def displaced(height: int, width: int, reach: int, random: Random) -> Array:
    """For each pixel the number of the pixel whose value it gets, (H * W,).

    Inner pixels are visited from the last to the first. Each takes over the value of a neighbour, as it is then: the
    published code exchanges two views of one array, which copies. Chains of visited neighbours are followed at once.
    """
    numbers = np.arange(height * width).reshape(height, width)
    rows, columns = np.arange(reach + 1, height - reach + 1), np.arange(reach + 1, width - reach + 1)
    inner = numbers[np.ix_(rows, columns)].ravel()
    steps = random.integers(-reach, reach, size=(2, len(inner)))  # `reach` itself is left out, as published
    source = numbers.ravel().copy()
    source[inner] = inner + steps[0] * width + steps[1]
    visited = np.zeros(height * width, dtype=bool)
    visited[inner] = True
    ends = numbers.ravel()
    going = visited[source] & (source > ends)  # that one already has its new value
    while going.any():
        # doubling: one more jump lands where the neighbour's own chain stands
        nearer = np.where(going, source[source], source)
        going &= going[source]
        source = nearer
    return source


def motion_blur(pixels: Array, random: Random, *, radius: float, deviation: float) -> Array:
    return streaks(pixels, radius, deviation, random.uniform(-45, 45))


def streaks(pixels: Array, radius: float, deviation: float, angle: float) -> Array:
    """Half a Gaussian of 2 * radius + 1 taps in the direction of the angle (degrees), as ImageMagick's motion blur."""
    height, width = pixels.shape[:2]
    taps = np.arange(2 * int(np.ceil(radius)) + 1)
    weights = np.exp(-(taps**2) / (2 * deviation**2))
    weights /= weights.sum()
    right, down = (np.ceil(taps * part(np.deg2rad(angle)) - 0.5).astype(int) for part in (np.cos, np.sin))
    rows, columns = np.arange(height), np.arange(width)
    blurred = np.zeros_like(pixels)
    for weight, x, y in zip(weights, right, down, strict=True):
        moved_rows, moved_columns = (rows + y).clip(0, height - 1), (columns + x).clip(0, width - 1)
        blurred += weight * pixels[moved_rows][:, moved_columns]
    return blurred


def zoom_blur(pixels: Array, random: Random, *, end: float, step: float) -> Array:
    """The mean of the image and of enlargements of its centre by 1, 1 + step, ... below `end`."""
    factors = np.arange(1, end, step)
    total = sum((enlarge(pixels, factor) for factor in factors), start=pixels)
    return total / (len(factors) + 1)


def enlarge(pixels: Array, factor: float) -> Array:
    """The centre, enlarged to the whole size by linear interpolation."""
    return stretch(stretch(pixels, factor, 0), factor, 1)


def stretch(pixels: Array, factor: float, axis: int) -> Array:
    side = pixels.shape[axis]
    inner = int(np.ceil(side / factor))
    large = round(inner * factor)  # a few pixels more than the side, which are cut off evenly
    places = (np.arange(side) + (large - side) // 2) * ((inner - 1) / max(large - 1, 1))
    low = np.floor(places).astype(int)
    high, start = np.minimum(low + 1, inner - 1), (side - inner) // 2
    share = (places - low).reshape(-1, *([1] * (pixels.ndim - 1 - axis)))
    return pixels.take(start + low, axis) * (1 - share) + pixels.take(start + high, axis) * share


# -- digital -------------------------------------------------------------------------------------


def contrast(pixels: Array, random: Random, *, factor: float) -> Array:
    means = pixels.mean(axis=(0, 1))
    return (pixels - means) * factor + means


def brightness(pixels: Array, random: Random, *, shift: float) -> Array:
    """Adds to the value of HSV; hue and saturation stay."""
    value = pixels.max(axis=-1, keepdims=True)
    brighter = (value + shift).clip(0, 1)
    return np.where(value > 0, pixels * (brighter / np.maximum(value, 1 / (2 * WHITE))), brighter)


def saturate(pixels: Array, random: Random, *, factor: float, shift: float) -> Array:
    """Stretches and shifts the saturation of HSV. Grey images stay; grey pixels of a coloured one have the hue red."""
    if pixels.shape[-1] == 1:
        return pixels
    value, least = pixels.max(axis=-1, keepdims=True), pixels.min(axis=-1, keepdims=True)
    spread = value - least
    saturation = spread / np.maximum(value, 1 / (2 * WHITE))
    wanted = (saturation * factor + shift).clip(0, 1)
    share = (value - pixels) / np.maximum(spread, 1 / (2 * WHITE))  # 0 for the largest channel, 1 for the smallest
    share = np.where(spread > 0, share, np.array([0.0, 1.0, 1.0]))
    return value * (1 - wanted * share)


def pixelate(pixels: Array, random: Random, *, share: float) -> Array:
    """Shrunk to a share of each side and enlarged again, by boxes."""
    image = as_image(pixels)
    small = image.resize((int(image.width * share), int(image.height * share)), Image.Resampling.BOX)
    return as_pixels(small.resize(image.size, Image.Resampling.BOX))


def jpeg_compression(pixels: Array, random: Random, *, quality: int) -> Array:
    file = BytesIO()
    as_image(pixels).save(file, "JPEG", quality=quality)
    return as_pixels(Image.open(file))


def as_image(pixels: Array) -> Image.Image:
    levels = np.rint(pixels * WHITE).astype(np.uint8)
    return Image.fromarray(levels[..., 0] if levels.shape[-1] == 1 else levels)


def as_pixels(image: Image.Image) -> Array:
    levels = np.asarray(image, dtype=np.float64) / WHITE
    return levels[..., None] if levels.ndim == 2 else levels


def elastic_transform(
    pixels: Array, random: Random, *, side: float, strength: float, smoothness: float, affine: float
) -> Array:
    """A random affine map, then displacements by smoothed noise. The three strengths are shares of `side` in pixels."""
    turned = sample(pixels, affine_map(pixels.shape[0], pixels.shape[1], affine * side, random), mode="mirror")
    return sample(turned, displacement(pixels.shape[0], pixels.shape[1], strength * side, smoothness * side, random))


def affine_map(height: int, width: int, reach: float, random: Random) -> Array:
    """Where each pixel comes from, (2, H, W): three points around the centre move by up to `reach` pixels."""
    centre, arm = np.array([height // 2, width // 2]), min(height, width) // 3
    before = centre + arm * np.array([(1, 1), (1, -1), (-1, -1)])  # (3, 2), row and column
    after = before + random.uniform(-reach, reach, size=before.shape)
    # points of the result as (row, column, 1) times the solution are points of the image
    solution = np.linalg.lstsq(np.hstack([after, np.ones((3, 1))]), before, rcond=None)[0]  # (3, 2)
    grid = np.stack([*np.mgrid[:height, :width], np.ones((height, width))])  # (3, H, W)
    return np.einsum("khw,kd->dhw", grid, solution)


def displacement(height: int, width: int, strength: float, smoothness: float, random: Random) -> Array:
    """Where each pixel comes from, (2, H, W): smoothed uniform noise around its own place."""
    noise = [random.uniform(-1, 1, size=(height, width)) for _ in range(2)]
    return np.mgrid[:height, :width] + strength * np.stack(
        [smooth(one, smoothness, mode="reflect", truncate=3) for one in noise]
    )


def sample(pixels: Array, places: Array, mode: str = "reflect") -> Array:
    """Bilinear values at places (2, H, W)."""
    ndimage = scipy("ndimage")
    channels = [
        ndimage.map_coordinates(pixels[..., channel], places, order=1, mode=mode) for channel in range(pixels.shape[-1])
    ]
    return np.stack(channels, axis=-1)
