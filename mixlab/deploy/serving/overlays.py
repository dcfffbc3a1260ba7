"""Maps and masks as small PNGs: their palette indices are the data, their colors are to be laid over an image."""

import base64
from io import BytesIO

import numpy as np
from PIL import Image

from mixlab.data.dense import IGNORE
from mixlab.data.kinds import Array
from mixlab.findings.drawing import BACKGROUND, color

# a path from blue over yellow to red whose opacity grows: (value, red, green, blue, alpha)
HEAT = (
    *((0.0, 30, 40, 140, 0), (0.25, 30, 110, 220, 90), (0.5, 60, 200, 150, 140)),
    *((0.75, 250, 210, 50, 185), (1.0, 220, 30, 30, 215)),
)
PALETTE = 256


def heat_png(values: Array) -> str:
    """A map (H, W) of values in [0, 1]."""
    stops = np.array(HEAT)
    at = np.linspace(0, 1, PALETTE)
    red, green, blue, alpha = (np.interp(at, stops[:, 0], stops[:, part]).round() for part in range(1, 5))
    return indexed(np.rint(values * (PALETTE - 1)).astype(np.uint8), np.stack([red, green, blue], 1), alpha)


def classes_png(mask: Array, names: tuple[str, ...]) -> str:
    """The class of every pixel (H, W); a class called 'background' and pixels without one are transparent."""
    colors = np.array([color(number) for number in range(PALETTE)])
    alpha = np.full(PALETTE, 255)
    clear = [number for number, name in enumerate(names) if name == BACKGROUND]
    alpha[[*clear, IGNORE]] = 0
    return indexed(mask, colors, alpha)


def object_png(mask: Array, number: int) -> str:
    """One object's pixels (H, W), True where it is, in the color of its class."""
    return indexed(mask.astype(np.uint8), np.array([(0, 0, 0), color(number)]), np.array([0, 255]))


def indexed(pixels: Array, colors: Array, alpha: Array) -> str:
    """A data URI of a palette PNG."""
    image = Image.fromarray(pixels)
    image.putpalette(colors.astype(np.uint8).tobytes())
    kept = BytesIO()
    image.save(kept, "PNG", transparency=alpha.astype(np.uint8).tobytes(), compress_level=4)
    return "data:image/png;base64," + base64.b64encode(kept.getvalue()).decode()


def css_color(number: int) -> str:
    return "#{:02x}{:02x}{:02x}".format(*color(number))
