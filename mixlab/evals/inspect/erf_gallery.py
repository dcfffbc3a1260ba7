"""Effective receptive fields of several models side by side: numbers, and a gallery of models x places."""

import functools
import textwrap
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mixlab.core.errors import ConfigError, require
from mixlab.core.processes import choose_device
from mixlab.data.images import decode
from mixlab.data.loader import Loader
from mixlab.data.open import open_data
from mixlab.data.shards import ShardStream
from mixlab.data.subset import Subset, spread
from mixlab.evals.inspect.erf import SHARES, Field, Part, find_places, measure_fields
from mixlab.evals.inspect.gradients import differentiable
from mixlab.evals.quality.accuracy import image_paths
from mixlab.evals.quality.resized import resized
from mixlab.evals.subjects import TIMM, Source, Subject, open_subject, short_names
from mixlab.findings.findings import Cell, Finding, Picture, figure, finding
from mixlab.models.config import parse_image_size

Scale = Literal["together", "model", "each"]
SCALES = {
    "together": "one scale for all pictures",
    "model": "one scale for each row",
    "each": "each picture from 0 to its own largest value",
}
COLUMNS = ("model", "place", "grid", *(f"{share:.0%} in, % of area" for share in SHARES))
CROSS_COLUMNS = ("in row and column, %", "cross-shapedness", "note")
CURVE = tuple(step / 20 for step in range(1, 21))  # shares of the contribution whose areas are kept
NOTE = "the channels cancel: their sum does not depend on the image"
NOTHING = "no pixel contributes"


def receptive_fields(
    models: Sequence[Source],
    *,
    data: str | PathLike[str] | None = None,
    split: Literal["train", "val", "test"] = "val",
    count: int = 50,
    images: Sequence[str | PathLike[str]] = (),
    image_size: int | tuple[int, int] | None = None,
    at: Sequence[str] = ("last",),
    part: Part = "positive",
    scale: Scale = "together",
    batch: int = 4,
    device: str = "auto",
    seed: int = 0,
    watch: Callable[[int, int], None] | None = None,
) -> tuple[Finding, dict[str, Any]]:
    """What the center of named places sees of `count` images of a dataset, or of image files.

    `at` are intermediates, or last, all-stages, all-blocks, first-and-last. `scale` is of the pictures only.
    """
    require((data is None) != (not images), "either a dataset (--data) or image files (--images).")
    require(count >= 1 and batch >= 1, f"1 image or more, 1 or more at once; got {count} and {batch}.")
    if scale not in SCALES:
        raise ConfigError(f"The pictures are scaled {', '.join(SCALES)}; got {scale!r}.")
    size = None if image_size is None else parse_image_size(image_size)
    given = chosen_images(data, split, count, images, batch)
    subjects = [open_at(model, size, seed) for model in models]
    places = [find_places(one.model, one.intermediate_names, at) for one in subjects]
    total = len(models) * (len(images) or count)
    rows: list[dict[str, Field]] = []
    for subject, wanted in zip(subjects, places, strict=True):
        own = subject.to(choose_device(device, 0))
        rows.append(fields_of(own, wanted, given, part, None if watch is None else lambda more: watch(more, total)))
        own.to("cpu")
    settings = {
        **{"images": rows[0][places[0][0]].images, "data": None if data is None else str(data), "split": split},
        **{"part": part, "scale": scale, "seed": seed},
    }
    return tell(subjects, rows, settings), {"erf": gallery(dict(enumerate(rows)), short_names(subjects), scale)}


def tell(subjects: Sequence[Subject], rows: Sequence[dict[str, Field]], settings: dict[str, Any]) -> Finding:
    sizes = {"image_sizes": [list(one.image_size) for one in subjects], "trained": [one.trained for one in subjects]}
    return finding(
        *("erf", "Effective receptive fields", (*COLUMNS, *CROSS_COLUMNS), table_of(subjects, rows)),
        settings={**settings, **sizes},
        data={"fields": [plain_fields(one.name, fields) for one, fields in zip(subjects, rows, strict=True)]},
        pictures=(Picture(name="erf", caption=caption(settings)),),
    )


def caption(settings: dict[str, Any]) -> str:
    return (
        f"Effective receptive fields over {settings['images']} images: what each pixel contributes to the center of a "
        f"feature map ({settings['part']} part of the gradient, logarithmic, {SCALES[settings['scale']]})."
    )


# -- what is looked at ---------------------------------------------------------------------------


def open_at(model: Source, size: tuple[int, int] | None, seed: int) -> Subject:
    """A model for images of a size; fresh Mixlab models are built for it, others are fitted to it."""
    if size is None:
        return open_subject(model, seed=seed)
    if isinstance(model, str) and model.startswith(TIMM):
        return resized(open_subject(model, seed=seed), size)[0]
    return open_subject(model, image_size=size, seed=seed)


Batches = Callable[[Subject], Iterator[Tensor]]


def chosen_images(
    data: str | PathLike[str] | None,
    split: Literal["train", "val", "test"],
    count: int,
    files: Sequence[str | PathLike[str]],
    batch: int,
) -> Batches:
    """What gives each model its batches; all of it is there, or nothing is measured."""
    if data is None:
        return functools.partial(batches_of_files, image_paths(files), batch)
    source = open_data(data, split)
    if not isinstance(source, ShardStream):
        source = spread(source, count)
    return functools.partial(batches_of_data, source, count, batch)


def batches_of_files(paths: Sequence[Path], batch: int, subject: Subject) -> Iterator[Tensor]:
    transform = subject.transform()
    for first in range(0, len(paths), batch):
        yield torch.stack([transform(decode(path)) for path in paths[first : first + batch]])


def batches_of_data(source: Subset | ShardStream, count: int, batch: int, subject: Subject) -> Iterator[Tensor]:
    left = count
    for found in Loader(source, subject.transform(), batch_size=batch, train=False, seed=0).epoch(0):
        yield found.images[:left]
        left -= len(found.images)
        if left <= 0:
            return


def fields_of(
    subject: Subject,
    places: Sequence[str],
    batches: Batches,
    part: Part,
    watch: Callable[[int], None] | None,
) -> dict[str, Field]:
    weight = next(subject.model.parameters())
    fed = (images.to(weight.device, weight.dtype) for images in batches(subject))
    with differentiable(subject.model):
        return measure_fields(lambda images: subject.intermediates(images, places), fed, part=part, watch=watch)


# -- what is shown -------------------------------------------------------------------------------


def table_of(subjects: Sequence[Subject], rows: Sequence[dict[str, Field]]) -> list[list[Cell]]:
    names = short_names(subjects)
    return [
        [name, place, "x".join(map(str, field.grid)), *numbers(field), note(field)]
        for name, fields in zip(names, rows, strict=True)
        for place, field in fields.items()
    ]


def numbers(field: Field) -> list[float | None]:
    shares = [field.area(share) for share in SHARES] + [field.in_cross]
    return [None if share is None else 100 * share for share in shares] + [field.cross]


def note(field: Field) -> str:
    return NOTE if field.canceled else NOTHING if field.empty else ""


def summary(field: Field) -> str:
    """The numbers below a picture."""
    cross = "" if field.cross is None else f", cross {round(field.cross, 2) + 0.0:.2f}"
    return f"90% in {100 * (field.area(0.9) or 0):.2g}%{cross}"


def plain_fields(name: str, fields: dict[str, Field]) -> dict[str, Any]:
    areas = {place: [field.area(share) for share in CURVE] for place, field in fields.items()}
    return {"model": name, "shares": list(CURVE), "areas": areas}


def rescaled(rows: dict[int, dict[str, Field]], scale: Scale) -> dict[tuple[int, str], Tensor]:
    """Scores from 0, where nothing contributes, to 1, the largest of the group."""
    scores = {(row, place): field.score for row, fields in rows.items() for place, field in fields.items()}
    shown = {key: value for key, value in scores.items() if not rows[key[0]][key[1]].empty}
    group = {"together": lambda key: 0, "model": lambda key: key[0], "each": lambda key: key}[scale]
    largest: dict[Any, float] = {}
    for key, score in shown.items():
        largest[group(key)] = max(largest.get(group(key), 0.0), float(score.max()))
    return {key: score / largest[group(key)] for key, score in shown.items()}


def gallery(rows: dict[int, dict[str, Field]], names: Sequence[str], scale: Scale) -> Any:
    """A row of pictures per model, from the image to the head."""
    columns = max(len(fields) for fields in rows.values())
    drawn = figure(1.0 + 1.55 * columns, 0.55 + 1.85 * len(rows))
    grid = drawn.subplots(len(rows), columns, squeeze=False)
    pictures, image = rescaled(rows, scale), None
    for row, fields in rows.items():
        for axes in grid[row][len(fields) :]:
            axes.set_axis_off()
        label = "\n".join(textwrap.wrap(names[row].replace("_", "_\u200b"), 20)).replace("\u200b", "")
        grid[row][0].set_ylabel(label, fontsize=8, parse_math=False)
        for axes, (place, field) in zip(grid[row], fields.items(), strict=False):
            axes.set(xticks=[], yticks=[])
            axes.set_title(place.replace(".blocks.", " block "), fontsize=8, parse_math=False)
            if (row, place) in pictures:
                image = axes.imshow(pictures[row, place].numpy(), cmap="inferno", vmin=0, vmax=1)
                axes.set_xlabel(summary(field), fontsize=7)
                continue
            axes.set_facecolor("0.9")
            axes.set_box_aspect(1)
            told = "\n".join(textwrap.wrap(note(field), 18))
            axes.text(0.5, 0.5, told, ha="center", va="center", fontsize=7, transform=axes.transAxes)
    if image is not None:
        bar = drawn.colorbar(image, ax=grid.ravel().tolist(), shrink=min(1.0, 2.0 / len(rows)), pad=0.02)
        bar.set_label("log10(contribution + 1), rescaled", fontsize=8)
        bar.ax.tick_params(labelsize=7)
    return drawn
