import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mixlab.core.errors import UnreadableImage
from mixlab.data.images import decode
from tests.data.make import packed, picture

CORNER = {  # where the stored top left pixel belongs, by EXIF orientation
    1: (0, 0), 2: (-1, 0), 3: (-1, -1), 4: (0, -1), 5: (0, 0), 6: (-1, 0), 7: (-1, -1), 8: (0, -1),
}  # fmt: skip


def inner(image: Image.Image, corner: tuple[int, int]) -> tuple[int, int]:
    """A pixel somewhat inside the corner."""
    return tuple(4 if side == 0 else length - 4 for side, length in zip(corner, image.size, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("orientation", CORNER)
@pytest.mark.parametrize("suffix", ["png", "jpg", "tif", "webp"])
def test_exif_orientation_is_applied(suffix: str, orientation: int, tmp_path: Path) -> None:
    image = Image.new("RGB", (48, 32))
    image.paste((255, 255, 255), (0, 0, 16, 16))
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(tmp_path / f"a.{suffix}", exif=exif)
    upright = decode(tmp_path / f"a.{suffix}").convert("L")
    assert upright.size == ((32, 48) if orientation > 4 else (48, 32))
    bright = [place for place in set(CORNER.values()) if upright.getpixel(inner(upright, place)) > 200]  # type: ignore[operator]
    assert bright == [CORNER[orientation]]


def test_a_grey_file_of_odd_size_stays_grey() -> None:
    image = decode(packed(Image.new("L", (33, 57), 7)))
    assert (image.mode, image.size, image.getpixel((0, 0))) == ("L", (33, 57), 7)


def test_one_bit_becomes_black_and_white() -> None:
    image = decode(packed(Image.new("1", (5, 5), 1)))
    assert (image.mode, image.getpixel((0, 0))) == ("L", 255)


def test_a_palette_becomes_its_colors() -> None:
    image = Image.new("P", (5, 5), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    assert decode(packed(image)).getpixel((2, 2)) == (10, 20, 30)


def test_a_transparent_palette_entry_is_white() -> None:
    image = Image.new("P", (5, 5), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    buffer = io.BytesIO()
    image.save(buffer, "PNG", transparency=1)
    assert decode(buffer.getvalue()).getpixel((2, 2)) == (255, 255, 255)


@pytest.mark.parametrize(("alpha", "expected"), [(0, 255), (255, 0), (128, 127)])
def test_alpha_lies_over_white(alpha: int, expected: int) -> None:
    image = decode(packed(Image.new("RGBA", (4, 4), (0, 0, 0, alpha))))
    assert (image.mode, image.getpixel((0, 0))) == ("RGB", (expected,) * 3)


def test_grey_with_alpha_stays_grey() -> None:
    image = decode(packed(Image.new("LA", (4, 4), (0, 0))))
    assert (image.mode, image.getpixel((0, 0))) == ("L", 255)


def test_a_cmyk_jpeg_becomes_rgb() -> None:
    red, green, blue = decode(packed(Image.new("CMYK", (16, 16), (255, 0, 0, 0)), "JPEG")).getpixel((8, 8))  # type: ignore[misc]
    assert red < 10
    assert green > 245
    assert blue > 245


@pytest.mark.parametrize(("value", "expected"), [(0, 0), (255, 1), (257 * 100, 100), (65535, 255)])
def test_sixteen_bits_are_scaled_to_eight(value: int, expected: int, tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4), value, np.uint16)).save(tmp_path / "a.png")
    image = decode(tmp_path / "a.png")
    assert (image.mode, image.getpixel((0, 0))) == ("L", expected)


def test_32_bit_integers_that_hold_16_bits_are_scaled_as_such(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4), 65535 // 2, np.int32)).save(tmp_path / "a.tif")
    assert decode(tmp_path / "a.tif").getpixel((0, 0)) == 127


def test_floats_from_0_to_1_are_scaled(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4), 0.2, np.float32)).save(tmp_path / "a.tif")
    assert decode(tmp_path / "a.tif").getpixel((0, 0)) == 51


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation_is_taken(form: str) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ((255, 0, 0), (0, 0, 255))]
    buffer = io.BytesIO()
    frames[0].save(buffer, form, save_all=True, append_images=frames[1:])
    red, _, blue = decode(buffer.getvalue()).getpixel((4, 4))  # type: ignore[misc]
    assert red > 200
    assert blue < 50


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "BMP", "TIFF"])
def test_a_truncated_file_is_unreadable_and_named(form: str, tmp_path: Path) -> None:
    path = tmp_path / "half.img"
    raw = packed(picture(0, (64, 64)), form)
    path.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(UnreadableImage, match=r"half\.img"):
        decode(path)


@pytest.mark.parametrize("raw", [b"", b"no image at all", b"\x89PNG\r\n\x1a\n" + b"\0" * 40])
def test_what_is_no_image_is_unreadable(raw: bytes) -> None:
    with pytest.raises(UnreadableImage, match="sample 3"):
        decode(raw, name="sample 3")


def test_a_missing_file_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(UnreadableImage, match=r"gone\.png.*No such file"):
        decode(tmp_path / "gone.png")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("limit", [60, 10])  # Pillow warns at the first and raises at the second
def test_a_decompression_bomb_is_an_error(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = packed(picture(0, (10, 10)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(UnreadableImage, match="decompression bomb"):
        decode(raw)


def test_an_open_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    picture(1).save(path)
    with path.open("rb") as file:
        assert decode(file).tobytes() == picture(1).tobytes()
