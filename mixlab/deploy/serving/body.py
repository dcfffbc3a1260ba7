"""The images of a request's body, read within its limits of bytes, count and time."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Protocol

from python_multipart.multipart import parse_options_header
from starlette.requests import ClientDisconnect, Request

from mixlab.deploy.serving.limits import Limits, Refusal, Room
from mixlab.deploy.serving.multipart import FilesInMemory

FORM = "multipart/form-data"
IMAGE_TYPES = ("jpeg", "png", "webp", "gif", "bmp", "tiff", "avif")
LINGER_SECONDS = 2.0  # how long a refused body is still taken in, so that its sender reads the answer
LINGER_BYTES = 2**26


class Sink(Protocol):
    def take(self, piece: bytes) -> None: ...
    def finish(self) -> list[bytes]: ...


class OneImage:
    """A body that is the image itself."""

    def __init__(self) -> None:
        self.data = bytearray()

    def take(self, piece: bytes) -> None:
        self.data.extend(piece)

    def finish(self) -> list[bytes]:
        return [bytes(self.data)]


async def read_images(request: Request, limits: Limits, room: Room) -> tuple[list[bytes], int]:
    """The encoded images, and how many bytes of the room they take: the caller gives these back."""
    taken = 0
    pieces = request.stream()
    try:
        sink = sink_for(request, limits)
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limits.max_bytes:
            raise too_large(limits)
        try:
            async with asyncio.timeout(limits.timeout):
                async for piece in pieces:
                    if taken + len(piece) > limits.max_bytes:
                        raise too_large(limits)
                    room.take(len(piece))
                    taken += len(piece)
                    sink.take(piece)
                    await asyncio.sleep(0)  # bodies that arrive at full speed let other requests in between
        except TimeoutError:
            raise Refusal(408, f"The body did not arrive within {limits.timeout:g} seconds.") from None
        except ClientDisconnect:
            raise Refusal(400, "The connection closed before the body was complete.") from None
        return sink.finish(), taken
    except BaseException as error:
        room.give_back(taken)
        if isinstance(error, Refusal) and error.status != 408:
            await linger(pieces)
        raise


def sink_for(request: Request, limits: Limits) -> Sink:
    """By the declared type; anything but a form or an image is refused."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    said = kind.decode("latin-1").lower()
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Refusal(415, "The body is compressed as a whole (Content-Encoding). Send images as they are.")
    if said == FORM:
        if not options.get(b"boundary"):
            raise Refusal(400, f"The content type {FORM} names no boundary.")
        return FilesInMemory(options[b"boundary"], limits.max_images)
    if said.removeprefix("image/") in IMAGE_TYPES and said.startswith("image/"):
        return OneImage()
    raise Refusal(415, f"Send {FORM}, or one image as image/{', image/'.join(IMAGE_TYPES)}.")


def too_large(limits: Limits) -> Refusal:
    return Refusal(413, f"The body has more than the {limits.max_bytes} bytes that are taken.")


async def linger(pieces: AsyncIterator[bytes]) -> None:
    """Take in and forget the rest of a body: closing on a client that still sends would lose the answer."""
    until, seen = time.monotonic() + LINGER_SECONDS, 0
    try:
        async with asyncio.timeout_at(asyncio.get_running_loop().time() + LINGER_SECONDS):
            async for piece in pieces:
                seen += len(piece)
                if seen > LINGER_BYTES or time.monotonic() > until:
                    return
    except (TimeoutError, ClientDisconnect, RuntimeError):
        return
