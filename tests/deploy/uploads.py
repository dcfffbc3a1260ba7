"""Images and bodies, good and bad, that tests of the server send."""

import struct
import zlib
from io import BytesIO

import numpy as np
from PIL import Image

BOUNDARY = b"between"


def photo(number: int, width: int = 48, height: int = 40) -> Image.Image:
    """A picture of its own for every number."""
    pixels = np.random.default_rng(number).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    kept = BytesIO()
    image.save(kept, kind, **options)
    return kept.getvalue()


def png(number: int, width: int = 48, height: int = 40) -> bytes:
    return encoded(photo(number, width, height))


def truncated_jpeg(number: int = 0) -> bytes:
    whole = encoded(photo(number, 160, 120), "JPEG")
    return whole[: len(whole) // 2]


def bomb(side: int = 10_000) -> bytes:
    """A gray PNG of side x side pixels: a hundred megapixels in a hundred kilobytes."""
    squeeze = zlib.compressobj(9)
    rows = b"".join(squeeze.compress(bytes(side + 1)) for _ in range(side)) + squeeze.flush()
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def form(*files: bytes, name: str = "image.png", kind: str = "image/png", field: str = "files") -> bytes:
    """A multipart body; its content type is FORM."""
    head = f'Content-Disposition: form-data; name="{field}"; filename="{name}"\r\nContent-Type: {kind}\r\n\r\n'.encode()
    parts = b"".join(b"--" + BOUNDARY + b"\r\n" + head + data + b"\r\n" for data in files)
    return parts + b"--" + BOUNDARY + b"--\r\n"


FORM = f"multipart/form-data; boundary={BOUNDARY.decode()}"
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(/tmp/executed) (w) file closefile\nshowpage\n"
