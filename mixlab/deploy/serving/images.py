"""Uploaded files as images: what they are is decided by their content, and refused before it costs anything."""

import functools
import warnings
from io import BytesIO

from PIL import Image, UnidentifiedImageError

from mixlab.core.errors import UnreadableImage
from mixlab.data.images import decode, reason
from mixlab.deploy.serving.limits import Limits, Refusal

# Pillow's readers of plain pictures; others run programs (EPS), nest files or are seldom tested
FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")


def check_image(data: bytes, limits: Limits) -> None:
    """Refuse by the header alone what is no image, or one with too many pixels."""
    try:
        with Image.open(BytesIO(data), formats=known_formats()) as image:
            limits.check_shape(*image.size)
    except Refusal:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise Refusal(413, f"It has more than {limits.max_pixels} pixels, the most that is taken.") from None
    except UnidentifiedImageError:
        known = ", ".join(name for name in FORMATS if name != "MPO")
        told = "An empty file is not an image" if not data else "The file is not an image of a known format"
        raise Refusal(422, f"{told} ({known}).") from None
    except Exception as error:  # on broken files Pillow's readers raise nearly anything
        raise Refusal(422, f"The file is not a readable image: {reason(error)}.") from error


@functools.cache
def known_formats() -> list[str]:
    """Those of this Pillow. Its warning of large images is not needed: such images are refused."""
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def blank_image() -> bytes:
    kept = BytesIO()
    Image.new("RGB", (64, 64), (128, 128, 128)).save(kept, "PNG")
    return kept.getvalue()


def decoded(data: bytes) -> Image.Image:
    try:
        return decode(data, name="The file", formats=known_formats())
    except UnreadableImage as error:
        raise Refusal(422, str(error)) from None
