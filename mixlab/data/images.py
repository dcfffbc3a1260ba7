"""Image files as they are found in the wild, decoded to upright 8-bit gray or RGB."""

from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import ExifTags, Image

from mixlab.core.errors import UnreadableImage

STORED_MODE = "stored_mode"  # key in `Image.info` for the mode that the file had

# what undoes each EXIF orientation
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# white in modes of more than 8 bits: the first of these that no pixel exceeds
WHITE = {"I": (2**16 - 1, 2**31 - 1), "F": (1, 2**8 - 1, 2**16 - 1, 2**31 - 1)}
GRAY_WITH_ALPHA = ("LA", "La")
GRAY = ("1", "L")


def decode(source: Path | bytes | BinaryIO, *, name: str = "", formats: list[str] | None = None) -> Image.Image:
    """The first frame, upright, in mode L or RGB; transparency becomes white.

    Whatever is wrong with the file, the error is `UnreadableImage` and names it (`name`, if the source has no path).
    `formats` are the ones that are taken, in Pillow's words; by default all that it knows.
    """
    name = name or (str(source) if isinstance(source, Path) else getattr(source, "name", "") or "image in memory")
    try:
        with Image.open(BytesIO(source) if isinstance(source, bytes) else source, formats=formats) as image:
            refuse_bomb(image)
            image.load()
            stored = image.mode
            plain = eight_bit(upright(image))
    except UnreadableImage as error:
        raise UnreadableImage(f"{name}: {error}") from None
    except Exception as error:  # on broken files Pillow's decoders raise nearly anything
        raise UnreadableImage(f"{name} is not a readable image: {reason(error)}.") from error
    plain.info = {STORED_MODE: stored}
    return plain


def reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).rstrip(".").split()) or type(error).__name__


def refuse_bomb(image: Image.Image) -> None:
    """Pillow only warns of an image between once and twice its limit."""
    limit, (width, height) = Image.MAX_IMAGE_PIXELS, image.size
    if limit is not None and width * height > limit:
        raise UnreadableImage(
            f"{width} x {height} pixels are more than the {limit} that are decoded, in case it is a decompression "
            f"bomb. Shrink the image, or raise PIL.Image.MAX_IMAGE_PIXELS if you trust it."
        )


def upright(image: Image.Image) -> Image.Image:
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # a broken EXIF block beside good pixels
        return image
    return image.transpose(UPRIGHT[orientation]) if orientation in UPRIGHT else image


def eight_bit(image: Image.Image) -> Image.Image:
    """Any mode as L or RGB: a new image without ties to its file."""
    if image.mode.startswith("I;16"):
        return from_deep(np.asarray(image), (2**16 - 1,))
    if image.mode in WHITE:
        return from_deep(np.asarray(image), WHITE[image.mode])
    if image.has_transparency_data:
        return over_white(image)
    return image.convert("L" if image.mode in GRAY else "RGB")


def from_deep(values: np.ndarray[Any, Any], whites: tuple[int, ...]) -> Image.Image:
    values = np.nan_to_num(values.astype(np.float64)).clip(min=0)
    white = next((white for white in whites if values.max(initial=0) <= white), whites[-1])
    return Image.fromarray(np.rint(values.clip(max=white) * (255 / white)).astype(np.uint8))


def over_white(image: Image.Image) -> Image.Image:
    gray = image.mode in (*GRAY, *GRAY_WITH_ALPHA)
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image).convert("L" if gray else "RGB")
