"""What a request may cost, and the refusal of one that would cost more."""

from dataclasses import dataclass

from PIL import Image

from mixlab.core.errors import MixlabError, require

MEBIBYTE = 2**20
HELD_BODIES = 16  # full-size bodies that are held in memory at once, over all requests
LONGEST = 100  # the longer side over the shorter one: resizing the shorter side up must not make a giant of the other
RETRY_SECONDS = 1  # what a client that was sent away for lack of room is asked to wait


class Refusal(MixlabError):
    """A request that is answered with an error: its HTTP status, the reason, and which image it is about."""

    def __init__(self, status: int, reason: str, *, image: int | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.image = status, reason, image

    def about(self, image: int, count: int) -> "Refusal":
        """The same, of one of several images (counted from 1)."""
        told = f"Image {image} of {count}: {self.reason}" if count > 1 else self.reason
        return Refusal(self.status, told, image=image)


class Overload(Refusal):
    """More work than there is room for; the same request may succeed a little later."""

    def __init__(self, reason: str) -> None:
        super().__init__(503, f"{reason} Try again in a moment.")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one request: bytes of its body, pixels of an image, images, and seconds for sending and for the answer.

    `queue` is how many images of all requests may wait for the model.
    """

    max_bytes: int = 20 * MEBIBYTE
    max_pixels: int = 32_000_000
    max_images: int = 32
    timeout: float = 30.0
    queue: int = 1024

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_pixels", "max_images", "queue"):
            require(getattr(self, name) >= 1, f"{name} of 1 or more; got {getattr(self, name)}.")
        require(0 < self.timeout < float("inf"), f"a timeout above 0 seconds; got {self.timeout}.")
        most = Image.MAX_IMAGE_PIXELS
        require(
            most is None or self.max_pixels <= most,
            f"max_pixels of {most} or less, which is what Pillow decodes; got {self.max_pixels}.",
        )

    def check_shape(self, width: int, height: int) -> None:
        """Refuse an image by its header alone, before a pixel of it is decoded."""
        if width * height > self.max_pixels:
            raise Refusal(413, f"{width} x {height} pixels are more than {self.max_pixels}, the most that is taken.")
        if max(width, height) > LONGEST * min(width, height):
            raise Refusal(422, f"{width} x {height} pixels: the sides may differ by a factor of {LONGEST}, not more.")


class Room:
    """Bytes of bodies that all requests together hold in memory."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0

    def take(self, count: int) -> None:
        if self.held + count > self.most:
            raise Overload("Too many large requests at once.")
        self.held += count

    def give_back(self, count: int) -> None:
        self.held -= count
