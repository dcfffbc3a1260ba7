"""Masks and boxes drawn onto images."""

import colorsys
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from mixlab.data.dense import IGNORE
from mixlab.data.kinds import Array

Values = Tensor | Array | Sequence[Any]
Color = tuple[int, int, int]
Spot = tuple[int, int, int, int]  # left, top, right, bottom

# Okabe and Ito's colors without black, which stay apart for color-blind eyes, and five that differ in brightness too
SAFE = (
    *((230, 159, 0), (86, 180, 233), (0, 158, 115), (213, 94, 0), (204, 121, 167), (0, 114, 178), (240, 228, 66)),
    *((136, 34, 85), (160, 230, 60), (75, 45, 170), (225, 225, 225), (115, 70, 35)),
)
GOLDEN = 0.618034  # turns of the hue between further classes: no two close ones are alike
TINT = 0.55  # how much of an object's pixels is its color
BACKGROUND = "background"  # the class that is not painted
LEAST_SIDE = 320  # px; a smaller image is enlarged by a whole factor, so that words fit on it
PADDING = 3  # px around a word
FONT_SHARE = 1 / 36  # of the longer side
FONT_RANGE = (13, 40)


def draw_objects(
    image: Image.Image,
    boxes: Values,
    labels: Values,
    scores: Values | None = None,
    masks: Values | None = None,
    class_names: Sequence[str] = (),
) -> Image.Image:
    """Boxes, named, with their masks if there are any. A small image comes back enlarged by a whole factor.

    The highest scores are drawn last, on top.
    """
    zoom = enlargement(image)
    numbers = array(labels, np.int64).reshape(-1)
    certain = None if scores is None else array(scores, np.float64).reshape(-1)
    order = np.arange(len(numbers)) if certain is None else np.argsort(certain, kind="stable")
    if masks is not None and len(numbers):
        image = tinted(image, array(masks, np.bool_)[order], numbers[order])
    canvas = enlarged(image, zoom)
    if masks is not None:
        outline(canvas, array(masks, np.bool_)[order], numbers[order], zoom)
    spots = [spot(box, canvas.size, zoom) for box in array(boxes, np.float64).reshape(-1, 4)]
    pen = ImageDraw.Draw(canvas)
    for number in order:
        frame(pen, spots[number], color(int(numbers[number])), line_width(canvas))
    texts = [class_name(int(number), class_names) for number in numbers]
    if certain is not None:
        texts = [f"{text}: {score:.2f}" for text, score in zip(texts, certain, strict=True)]
    places: dict[int, Spot] = {}
    for number in reversed(order):  # the most certain choose their place first and are written last
        places[number] = free_place(canvas, texts[number], spots[number], list(places.values()))
    for number in order:
        write(canvas, texts[number], places[number], color(int(numbers[number])))
    return canvas


def draw_mask(image: Image.Image, mask: Array, class_names: Sequence[str] = ()) -> Image.Image:
    """Classes as tints with outlines, and a legend below of those that are there, the largest first.

    Pixels to ignore and a class called 'background' are left as they are.
    """
    values, counts = np.unique(mask, return_counts=True)
    by_size = values[np.argsort(-counts, kind="stable")].tolist()
    shown = [value for value in by_size if value != IGNORE and class_name(value, class_names) != BACKGROUND]
    zoom = enlargement(image)
    layers = np.stack([mask == value for value in shown]) if shown else np.zeros((0, *mask.shape), dtype=np.bool_)
    canvas = enlarged(tinted(image, layers, np.array(shown, dtype=np.int64)), zoom)
    outline(canvas, layers, np.array(shown, dtype=np.int64), zoom)
    return with_legend(canvas, [(class_name(value, class_names), color(value)) for value in shown])


# -- colors -------------------------------------------------------------------------------------


def color(number: int) -> Color:
    """Of a class: always the same, and unlike those of the classes before it."""
    if number < len(SAFE):
        return SAFE[number]
    turn = number - len(SAFE)
    strength, brightness = ((0.85, 0.95), (0.5, 0.95), (0.9, 0.6))[turn % 3]
    red, green, blue = colorsys.hsv_to_rgb(turn * GOLDEN % 1, strength, brightness)
    return round(255 * red), round(255 * green), round(255 * blue)


def ink(paper: Color) -> Color:
    """Black or white, whichever is easier to read on it."""
    red, green, blue = paper
    return (0, 0, 0) if 0.299 * red + 0.587 * green + 0.114 * blue > 130 else (255, 255, 255)


def tinted(image: Image.Image, masks: Array, numbers: Array) -> Image.Image:
    """(N, H, W) masks over the image; where several are, the last one."""
    pixels = np.array(image.convert("RGB"), dtype=np.float32)
    for mask, number in zip(masks, numbers, strict=True):
        pixels[mask] += TINT * (np.array(color(int(number)), dtype=np.float32) - pixels[mask])
    return Image.fromarray(pixels.round().astype(np.uint8))


def outline(canvas: Image.Image, masks: Array, numbers: Array, zoom: int) -> None:
    """The inner border of every mask in its full color, drawn at the canvas's own size."""
    width = line_width(canvas)
    for mask, number in zip(masks, numbers, strict=True):
        large = mask.repeat(zoom, 0).repeat(zoom, 1)
        inner = eroded(large, width)
        canvas.paste(color(int(number)), mask=Image.fromarray(large & ~inner))


def eroded(mask: Array, width: int) -> Array:
    """Without its outermost pixels; the image's border is no border of a mask."""
    padded = np.pad(mask, width, mode="edge")
    rows, columns = mask.shape
    inner = mask.copy()
    for step in range(2 * width + 1):
        inner &= (
            padded[step : step + rows, width : width + columns] & padded[width : width + rows, step : step + columns]
        )
    return inner


# -- boxes and words -----------------------------------------------------------------------------


def enlargement(image: Image.Image) -> int:
    return max(1, -(-LEAST_SIDE // max(image.size)))


def enlarged(image: Image.Image, zoom: int) -> Image.Image:
    """A new RGB image; pixels stay squares, so that a mask can be judged pixel by pixel."""
    size = (image.width * zoom, image.height * zoom)
    return image.convert("RGB").resize(size, Image.Resampling.NEAREST)


def line_width(canvas: Image.Image) -> int:
    return max(2, round(max(canvas.size) / 350))


def spot(box: Array, size: tuple[int, int], zoom: int) -> Spot:
    """A box in whole pixels of the canvas, at least one large and inside."""
    left, top, right, bottom = (round(float(value) * zoom) for value in np.nan_to_num(box))
    left, top = min(max(left, 0), size[0] - 1), min(max(top, 0), size[1] - 1)
    return left, top, min(max(right, left + 1), size[0]), min(max(bottom, top + 1), size[1])


def frame(pen: ImageDraw.ImageDraw, box: Spot, shade: Color, width: int) -> None:
    """A rectangle with a thin dark rim inside, which keeps it visible on its own color."""
    left, top, right, bottom = box[0], box[1], box[2] - 1, box[3] - 1
    pen.rectangle((left, top, right, bottom), outline=shade, width=width)
    if min(right - left, bottom - top) > 4 * width:
        rim = tuple(value // 3 for value in shade)
        pen.rectangle((left + width, top + width, right - width, bottom - width), outline=rim)


def font(canvas: Image.Image) -> Any:
    least, most = FONT_RANGE
    return ImageFont.load_default(min(max(round(FONT_SHARE * max(canvas.size)), least), most))


def free_place(canvas: Image.Image, text: str, box: Spot, taken: Sequence[Spot]) -> Spot:
    """For a word on its box: above it, below or inside, whichever is inside the image and covers no other word."""
    left, top, right, bottom = (round(edge) for edge in ImageDraw.Draw(canvas).textbbox((0, 0), text, font(canvas)))
    width, height = right - left + 2 * PADDING, bottom - top + 2 * PADDING
    places = [
        (max(0, min(x, canvas.width - width)), max(0, min(y, canvas.height - height)))
        for y in (box[1] - height, box[3], box[1], box[3] - height)
        for x in (box[0], box[2] - width)
    ]
    spots = [(x, y, x + width, y + height) for x, y in places]
    return next((spot for spot in spots if not any(meets(spot, other) for other in taken)), spots[0])


def write(canvas: Image.Image, text: str, place: Spot, shade: Color) -> None:
    pen, letters = ImageDraw.Draw(canvas), font(canvas)
    pen.rectangle((place[0], place[1], place[2] - 1, place[3] - 1), fill=shade)
    left, top, _, _ = pen.textbbox((0, 0), text, letters)
    pen.text((place[0] + PADDING - left, place[1] + PADDING - top), text, ink(shade), letters)


def meets(one: Spot, other: Spot) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def with_legend(canvas: Image.Image, entries: Sequence[tuple[str, Color]]) -> Image.Image:
    """The image with a strip below that names its colors."""
    if not entries:
        return canvas
    letters = font(canvas)
    pen = ImageDraw.Draw(canvas)
    side = round(pen.textbbox((0, 0), "Ag", font=letters)[3])
    pitch, places, x, y = round(1.6 * side), [], side // 2, side // 2
    for name, _ in entries:
        width = round(1.5 * side + pen.textlength(name, font=letters))
        if x + width > canvas.width and x > side // 2:
            x, y = side // 2, y + pitch
        places.append((x, y))
        x += width + side
    whole = Image.new("RGB", (canvas.width, canvas.height + y + pitch), (255, 255, 255))
    whole.paste(canvas)
    pen = ImageDraw.Draw(whole)
    for (name, shade), (left, top) in zip(entries, places, strict=True):
        top += canvas.height
        pen.rectangle((left, top, left + side, top + side), fill=shade)
        pen.text((left + round(1.5 * side), top + side // 2), name, fill=(0, 0, 0), font=letters, anchor="lm")
    return whole


def class_name(number: int, class_names: Sequence[str]) -> str:
    return class_names[number] if 0 <= number < len(class_names) else f"class {number}"


def array(values: Values, kind: Any) -> Array:
    plain = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
    return np.asarray(plain, dtype=kind)
