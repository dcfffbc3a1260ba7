"""`digit-scenes`: real handwritten digits on cluttered canvases with exact masks and boxes, made on the fly.

A scene is a function of its split and index alone. Train, val and test show digits of the disjoint splits of `digits`.
"""

import functools
from math import cos, pi, sin
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from mixlab.core.errors import DataError
from mixlab.data.dense import Annotated, MaskData, Masked, ObjectData, Objects
from mixlab.data.digits import open_digits
from mixlab.data.kinds import Array
from mixlab.data.seeding import seed_of

SCENES = {"train": 2000, "val": 200, "test": 400}
SIDE = 96  # pixels
SMALLEST = 48  # px; below it digits are no longer readable
DIGITS = tuple(str(digit) for digit in range(10))
EMPTY = 0.05  # the share of scenes without a digit
MOST = 5  # digits in one scene
HEIGHT = (0.24, 0.44)  # of a digit, as a share of the canvas
TURN = 0.22  # radians to either side; more would turn a 6 into no digit
MARGIN = 2  # empty pixels around a digit's 8 x 8, for interpolation and turning
INK = 135  # of 255: what is darker is paper
EDGE = 40  # brightness over which ink fades into paper
FAINT = 0.6  # how opaque the lightest ink is; the strokes inside a blot can still be told apart
GROUND = (20, 140)  # colors of the background: digits are chalk on a board
CONTRAST = 60  # how much brighter than what is behind it a digit is at least
CROWDED = 0.25  # the largest share of a digit that a later one may cover
TRIES = 8  # places tried for a digit before it is left out
GRAIN = 16  # levels of noise in every pixel
BLOTCHES = 6  # along a side of the canvas
PIECES = (1, 4)  # pieces of other digits in the background
PIECE = 4  # of the 8 pixels of a digit's side
LINES = (0, 4)
OVER = 0.3  # of the lines pass in front of the digits
BRIGHTNESS = np.array([0.299, 0.587, 0.114], dtype=np.float32)


class Scene(NamedTuple):
    pixels: Array  # (side, side, 3) uint8
    owner: Array  # (side, side) int: the number of the digit that is seen there, -1 for none
    labels: Array  # (digits,) int


class SceneMasks(MaskData):
    """Scenes for segmentation: the background is class 0, digit d is class d + 1."""

    class_names = ("background", *DIGITS)

    def __init__(self, split: str, *, side: int = SIDE, scenes: int | None = None) -> None:
        self.split, self.side, self.scenes = split, side, check_scenes(split, side, scenes)

    def __len__(self) -> int:
        return self.scenes

    def read(self, index: int) -> Masked:
        scene = make_scene(self.split, within(index, self.scenes), self.side)
        classes = np.append(scene.labels + 1, 0).astype(np.uint8)  # owner -1 finds the last entry
        return Masked(Image.fromarray(scene.pixels), classes[scene.owner])

    def name(self, index: int) -> str:
        return f"digit-scenes/{self.split}[{index}]"


class SceneObjects(ObjectData):
    """The same scenes for detection: boxes are tight around what is seen of a digit."""

    class_names = DIGITS
    has_masks = True

    def __init__(self, split: str, *, side: int = SIDE, scenes: int | None = None) -> None:
        self.split, self.side, self.scenes = split, side, check_scenes(split, side, scenes)

    def __len__(self) -> int:
        return self.scenes

    def read(self, index: int) -> Annotated:
        scene = make_scene(self.split, within(index, self.scenes), self.side)
        masks = scene.owner == np.arange(len(scene.labels))[:, None, None]
        objects = Objects(
            boxes=torch.from_numpy(tight_boxes(masks)),
            labels=torch.from_numpy(scene.labels),
            masks=torch.from_numpy(masks),
            crowd=torch.zeros(len(masks), dtype=torch.bool),
            area=torch.from_numpy(masks.sum((1, 2)).astype(np.float32)),
        )
        return Annotated(Image.fromarray(scene.pixels), objects)

    def name(self, index: int) -> str:
        return f"digit-scenes/{self.split}[{index}]"


def open_scene_masks(split: str, *, side: int = SIDE, scenes: int | None = None) -> SceneMasks:
    return SceneMasks(split, side=side, scenes=scenes)


def open_scene_objects(split: str, *, side: int = SIDE, scenes: int | None = None) -> SceneObjects:
    return SceneObjects(split, side=side, scenes=scenes)


def check_scenes(split: str, side: int, scenes: int | None) -> int:
    if split not in SCENES:
        raise DataError(f"Unknown split {split!r} of digit-scenes. Expected one of: {', '.join(SCENES)}.")
    scenes = SCENES[split] if scenes is None else scenes
    if side < SMALLEST or scenes < 1:
        raise DataError(
            f"digit-scenes needs a side of {SMALLEST} px or more and 1 scene or more; got {side} px and {scenes}."
        )
    return scenes


def within(index: int, count: int) -> int:
    if not 0 <= index < count:
        raise IndexError(f"scene {index} of {count}")
    return index


# -- a scene -------------------------------------------------------------------------------------


def make_scene(split: str, index: int, side: int) -> Scene:
    seed = seed_of(list(SCENES).index(split), index)
    random = np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32])  # a stream that numpy keeps as it is
    canvas = background(random, side)
    owner = np.full((side, side), -1)
    glyphs, classes = sources(split)
    for _ in range(random.randint(*PIECES)):
        paint_piece(random, canvas, glyphs[random.randint(len(glyphs))])
    lines = random.randint(*LINES)
    over = random.binomial(lines, OVER)
    for _ in range(lines - over):
        paint(canvas, line(random, side), random.randint(0, 256, 3))
    labels: list[int] = []
    for _ in range(0 if random.rand() < EMPTY else random.randint(1, MOST + 1)):
        chosen = random.randint(len(glyphs))
        if place_digit(random, canvas, owner, glyphs[chosen], number=len(labels)):
            labels.append(int(classes[chosen]))
    for _ in range(over):
        alpha = line(random, side)
        paint(canvas, alpha, random.randint(0, 256, 3))
        owner[alpha >= 0.5] = -1
    grain = np.frombuffer(random.bytes(canvas.size), dtype=np.uint8) & (GRAIN - 1)  # far faster than drawing numbers
    canvas += grain.reshape(canvas.shape)
    pixels = np.clip(canvas, GRAIN / 2, 255 + GRAIN / 2, out=canvas) - GRAIN / 2
    return without_hidden(Scene(pixels.astype(np.uint8), owner, np.array(labels, dtype=np.int64)))


def background(random: np.random.RandomState, side: int) -> Array:
    """A gradient between two colors with soft blotches, (side, side, 3) float32."""
    first, second = random.randint(*GROUND, (2, 3))
    angle, steps = random.uniform(0, 2 * pi), np.linspace(-0.5, 0.5, BLOTCHES)
    along = 0.5 + (cos(angle) * steps + sin(angle) * steps[:, None]) / (abs(cos(angle)) + abs(sin(angle)))
    colors = first + along[..., None] * (second - first)
    colors += random.uniform(0.05, 0.25) * random.randint(-128, 128, colors.shape)
    blotches = Image.fromarray(colors.clip(0, 255).astype(np.uint8))
    return np.array(blotches.resize((side, side), Image.Resampling.BICUBIC), dtype=np.float32)


def place_digit(random: np.random.RandomState, canvas: Array, owner: Array, glyph: Image.Image, number: int) -> bool:
    """Draw a digit where it hides little of the others; False if no such place was found."""
    side = len(canvas)
    height = random.uniform(*HEIGHT) * side
    shape, seen = stencil(glyph, height / 8, random.uniform(-TURN, TURN), random.uniform(0.85, 1.2))
    before = np.bincount(owner[owner >= 0], minlength=number)
    for _ in range(TRIES):
        top, left = random.randint(0, side - seen.shape[0] + 1), random.randint(0, side - seen.shape[1] + 1)
        window = (slice(top, top + seen.shape[0]), slice(left, left + seen.shape[1]))
        hidden = owner[window][seen]
        lost = np.bincount(hidden[hidden >= 0], minlength=number)
        if (lost <= CROWDED * before).all():
            paint(canvas[window], shape, standing_out(random, canvas[window][seen]))
            owner[window][seen] = number
            return True
    return False


def paint_piece(random: np.random.RandomState, canvas: Array, glyph: Image.Image) -> None:
    """A part of a digit, turned anywhere: strokes that look like a digit's and belong to none."""
    top, left = MARGIN + random.randint(0, 8 - PIECE + 1, 2)
    part = Image.new("L", (PIECE + 2 * MARGIN, PIECE + 2 * MARGIN))
    part.paste(glyph.crop((left, top, left + PIECE, top + PIECE)), (MARGIN, MARGIN))
    shape, _ = stencil(part, random.uniform(*HEIGHT) * len(canvas) / 8, random.uniform(-pi, pi), 1.0)
    top, left = (random.randint(0, len(canvas) - length + 1) for length in shape.shape)
    window = canvas[top : top + shape.shape[0], left : left + shape.shape[1]]
    paint(window, shape, random.randint(0, 256, 3))


def line(random: np.random.RandomState, side: int) -> Array:
    """How much of each pixel a straight line across the canvas covers, (side, side)."""
    angle, width = random.uniform(0, pi), random.uniform(0.008, 0.02) * side
    offset = random.uniform(0.1, 0.9) * cos(angle) + random.uniform(0.1, 0.9) * sin(angle)
    steps = np.arange(side, dtype=np.float32) + 0.5
    distance = np.abs(cos(angle) * steps + sin(angle) * steps[:, None] - offset * side)
    return (width / 2 + 0.5 - distance).clip(0, 1)


def paint(canvas: Array, alpha: Array, color: Array) -> None:
    canvas += alpha[..., None] * (color.astype(np.float32) - canvas)


def standing_out(random: np.random.RandomState, behind: Array) -> Array:
    """A color that is brighter than what it is painted on."""
    colors = random.randint(0, 256, (16, 3))
    apart = colors @ BRIGHTNESS - (behind @ BRIGHTNESS).mean()
    good = np.flatnonzero(apart >= CONTRAST)
    return colors[good[0] if len(good) else apart.argmax()]


def without_hidden(scene: Scene) -> Scene:
    """A digit of which lines and other digits left nothing is no object."""
    seen = np.bincount(scene.owner[scene.owner >= 0], minlength=len(scene.labels)) > 0
    if seen.all():
        return scene
    numbers = np.append(np.where(seen, np.cumsum(seen) - 1, -1), -1)
    return Scene(scene.pixels, numbers[scene.owner], scene.labels[seen])


# -- digits --------------------------------------------------------------------------------------


@functools.cache
def sources(split: str) -> tuple[list[Image.Image], Array]:
    """The digits of a split with an empty margin, and their classes."""
    data = open_digits(split)
    padded = np.pad(data.pixels, ((0, 0), (MARGIN, MARGIN), (MARGIN, MARGIN)))
    return [Image.fromarray(glyph) for glyph in padded], data.labels


@functools.cache
def opacity() -> Array:
    """Of ink by its level, (256,): half an edge below `INK` it fades out, and more ink hides more."""
    above = np.arange(256, dtype=np.float32) - INK
    return (above / EDGE + 0.5).clip(0, 1) * (FAINT + (1 - FAINT) / (255 - INK) * above).clip(0, 1)


def stencil(glyph: Image.Image, zoom: float, turn: float, stretch: float) -> tuple[Array, Array]:
    """A digit enlarged smoothly: how opaque its ink is, and which pixels are ink; cut to the latter."""
    length = round(zoom * glyph.width)
    across, down = 1 / (zoom * stretch), 1 / zoom  # source pixels per pixel
    rows = ((across * cos(turn), across * sin(turn)), (-down * sin(turn), down * cos(turn)))
    table = [value for a, b in rows for value in (a, b, glyph.width / 2 - (a + b) * length / 2)]
    levels = np.asarray(glyph.transform((length, length), Image.Transform.AFFINE, table, Image.Resampling.BICUBIC))
    seen = levels >= INK
    window = bounds(seen, 1), bounds(seen, 0)
    return opacity()[levels[window]], seen[window]


def bounds(mask: Array, over: int) -> slice:
    """From the first to the last row (over axis 1) or column (over axis 0) with anything in it."""
    found = np.flatnonzero(mask.any(over))
    return slice(found[0], found[-1] + 1) if len(found) else slice(0, 0)


def tight_boxes(masks: Array) -> Array:
    """(N, H, W) bool to (N, 4) float32: left, top, right, bottom of each mask's pixels."""
    boxes = np.empty((len(masks), 4), dtype=np.float32)
    for box, mask in zip(boxes, masks, strict=True):
        rows, columns = bounds(mask, 1), bounds(mask, 0)
        box[:] = columns.start, rows.start, columns.stop, rows.stop
    return boxes
