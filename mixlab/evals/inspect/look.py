"""`mixlab look`: what a model sees in image files, as sheets of pictures."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor

from mixlab.core.errors import ConfigError, near_misses, require
from mixlab.data.images import decode
from mixlab.evals import timm_places
from mixlab.evals.inspect.kernels import short
from mixlab.evals.inspect.maps import ATTENTION, GATES, Place, attention_maps, directions, feature_maps, gate_maps
from mixlab.evals.inspect.saliency import STEPS, black, grad_cam, integrated_gradients
from mixlab.evals.quality.accuracy import image_paths
from mixlab.evals.subjects import Subject, backbone_of
from mixlab.findings.findings import Cell, Finding, Picture, finding
from mixlab.findings.panels import Array, Panel, draw_sheet, wrapped
from mixlab.models.backbone import Backbone
from mixlab.models.ensemble import Ensemble

Sheet = tuple[str, list[list[Panel]]]  # caption and rows
What = Literal["attention", "gates", "gradcam", "gradients", "features"]
WHAT: tuple[What, ...] = ("gradcam", "gradients", "attention", "gates", "features")
COLUMNS = 8
FIRST = 6  # feature maps per stage, as in CoaT's Figure 8
MANY = 31  # feature maps of a single place


@dataclass(frozen=True, eq=False)
class SeenImage:
    """One image file on its way through the model."""

    path: str
    pixels: Tensor  # (1, C, H, W), normalized
    picture: Array  # (H, W, 3) in [0, 1], what the model gets
    said: int  # class with the highest score
    chance: float
    target: int  # class that is explained


@dataclass(frozen=True)
class Request:
    """What is asked about every image; `steps` of the path of integrated gradients."""

    what: tuple[What, ...]
    block: str | None = None
    query: Place | None = None
    steps: int = STEPS


def look_at(
    source: Subject,
    images: Sequence[str | PathLike[str]],
    *,
    what: Sequence[str] | None = None,
    block: str | None = None,
    target: str | int | None = None,
    query: Place | None = None,
    steps: int = STEPS,
    watch: Callable[[int, int], None] | None = None,
) -> tuple[Finding, dict[str, Any]]:
    """Pictures for image files: Grad-CAM and what the model can explain, unless `what` says otherwise.

    With `block`, single heads or channels of that place instead of means over all places. `target`: a class by name or
    number instead of the model's own answer. `query`: see `attention_maps`.
    """
    request = Request(wanted(source, what, block), block, query, steps)
    chosen = class_number(source, target)
    files = [look_once(source, str(path), chosen) for path in image_paths(images)]
    saliency: list[list[Panel]] = []
    sheets: dict[str, Sheet] = {}
    rows: list[list[Cell]] = []
    for index, seen in enumerate(files):
        row, gap = saliency_row(source, seen, request)
        saliency += [row] if len(row) > 1 else []
        for one in (one for one in request.what if one in SHEETS):
            sheets[f"{one}-{index}"] = (f"{one.capitalize()} on {seen.path}", SHEETS[one](source, seen, request))
        rows.append([seen.path, class_name(source, seen.said), 100 * seen.chance, class_name(source, seen.target), gap])
        if watch is not None:
            watch(index + 1, len(files))
    if saliency:
        sheets = {"saliency": ("Evidence for the class in the title", saliency), **sheets}
    about = {"model": source.name, "image_size": list(source.image_size), "trained": source.trained}
    made = finding(
        "look",
        f"What {source.name} sees",
        ("image", "class", "probability %", "explained", "gradient gap"),
        rows,
        settings={**about, **asdict(request)},
        pictures=tuple(Picture(name=name, caption=caption) for name, (caption, _) in sheets.items()),
    )
    return made, {name: draw_sheet(panels, caption) for name, (caption, panels) in sheets.items()}


# -- what is asked -------------------------------------------------------------------------------


def wanted(source: Subject, what: Sequence[str] | None, block: str | None) -> tuple[What, ...]:
    """The kinds of pictures; what this model cannot show is an error before anything is computed."""
    require(what is None or len(what) > 0, f"one or more of {', '.join(WHAT)}; got none.")
    for one in what or ():
        if one not in WHAT:
            raise ConfigError(f"There are no pictures of {one!r}. {near_misses(one, WHAT)}")
    if isinstance(source.model, Ensemble):
        backbone_of(source, "pictures")
    if what is None:
        able = explained_words(source, block)
        if block is None:
            return ("gradcam", *able)
        return able or ("features",)
    chosen = tuple(one for one in WHAT if one in what)
    for one in chosen:
        if one in ("attention", "gates"):
            backbone_of(source, one)
    if block is not None and not set(chosen) & set(SHEETS):
        raise ConfigError("A block is for attention, gates and features; the layer of Grad-CAM is the model's own.")
    return chosen


def explained_words(source: Subject, block: str | None) -> tuple[What, ...]:
    explanations = getattr(source.model, "explanations", {})
    words = {word for name, known in explanations.items() if block in (None, name) for word in known}
    found: list[What] = []
    found += ["attention"] if words & set(ATTENTION) else []
    found += ["gates"] if words & set(GATES) else []
    return tuple(found)


def class_number(source: Subject, target: str | int | None) -> int | None:
    """A class by its name or number."""
    if target is None:
        return None
    if str(target) in source.class_names:
        return source.class_names.index(str(target))
    if not str(target).isdecimal():
        known = source.class_names or (f"numbers from 0 to {source.num_classes - 1}",)
        raise ConfigError(f"{source.name!r} knows no class {target!r}. {near_misses(str(target), known)}")
    require(int(target) < source.num_classes, f"a class from 0 to {source.num_classes - 1}; got {target}.")
    return int(target)


def class_name(source: Subject, number: int) -> str:
    return source.class_names[number] if source.class_names else str(number)


@torch.no_grad()
def look_once(source: Subject, path: str, target: int | None) -> SeenImage:
    pixels = source.transform()(decode(image_paths([path])[0]))[None]
    pixels = pixels.to(next(source.model.parameters()).device)
    require(source.num_classes > 0, f"a model with a classifier; {source.name!r} has none.")
    chance, said = source.model(pixels).softmax(-1)[0].max(0)
    picture = unnormalized(source, pixels)
    return SeenImage(path, pixels, picture, int(said), float(chance), int(said) if target is None else target)


def unnormalized(source: Subject, pixels: Tensor) -> Array:
    """(1, C, H, W) as an RGB picture (H, W, 3)."""
    mean, std = (
        torch.tensor(values)[:, None, None] for values in (source.preprocessing.mean, source.preprocessing.std)
    )
    image = (pixels[0].cpu().float() * std + mean).clamp(0, 1)
    image = image[:3] if len(image) >= 3 else image[:1].expand(3, -1, -1)
    picture: Array = image.permute(1, 2, 0).numpy()
    return picture


# -- the sheets ----------------------------------------------------------------------------------


def saliency_row(source: Subject, seen: SeenImage, request: Request) -> tuple[list[Panel], float | None]:
    """The image, Grad-CAM and integrated gradients, and how far the latter miss the score."""
    row, gap = [Panel(seen.path.rpartition("/")[2], seen.picture, "image")], None
    name = class_name(source, seen.target)
    if "gradcam" in request.what:
        values = grad_cam(source, seen.pixels, seen.target)[0].cpu().numpy()
        doubt = "" if values.any() else " (no evidence)"
        row.append(Panel(f"Grad-CAM: {name}{doubt}", values, "share", seen.picture))
    if "gradients" in request.what:
        found = integrated_gradients(source, seen.pixels, seen.target, steps=request.steps)
        gap = completeness_gap(source, seen, found)
        row.append(Panel(f"integrated gradients: {name}", found[0].sum(0).cpu().numpy(), "signed"))
    return row, gap


@torch.no_grad()
def completeness_gap(source: Subject, seen: SeenImage, found: Tensor) -> float:
    """The sum of the attributions minus what it should be, the score minus that of the baseline."""
    scores = source.model(torch.cat([seen.pixels, black(source, seen.pixels)]))[:, seen.target]
    return float(found.sum() - (scores[0] - scores[1]))


def attention_sheet(source: Subject, seen: SeenImage, request: Request) -> list[list[Panel]]:
    """The mean over heads of every block, or every head of one."""
    blocks = None if request.block is None else [request.block]
    bare = all(grid.prefix == 0 for grid in backbone_of(source, "attention").reference_grids)
    mark = (0.5, 0.5) if request.query is None and bare else request.query
    panels = [Panel("image" if mark is None else "image, query at +", seen.picture, "image", mark=mark)]
    for name, maps in attention_maps(source, seen.pixels, blocks=blocks, query=request.query).items():
        heads = maps[0].cpu().float()
        shown = [(short(name), heads.mean(0))]
        if request.block is not None:
            shown = [(f"{short(name)} head {index}", head) for index, head in enumerate(heads)]
        signed = bool((heads < 0).any())  # factorised attention: colors of its own, so not over the image
        for title, values in shown:
            told = f"{title}\n{spread(values)}"
            panels.append(Panel(told, values.numpy(), *(("signed", None) if signed else ("heat", seen.picture))))
    return wrapped(panels, COLUMNS)


def gate_sheet(source: Subject, seen: SeenImage, request: Request) -> list[list[Panel]]:
    """A row for each block with its direction: the gates and the decay, as means over heads or head by head."""
    blocks = None if request.block is None else [request.block]
    ways, rows = directions(source), []
    for name, words in gate_maps(source, seen.pixels, blocks=blocks).items():
        parts = [("", {word: maps[0].mean(0) for word, maps in words.items()})]
        if request.block is not None:
            heads = next(iter(words.values())).shape[1]
            parts = [(f" head {head}", {w: maps[0, head] for w, maps in words.items()}) for head in range(heads)]
        for part, maps in parts:
            row = [Panel(f"{short(name)}{part}\n{ways[name]}", seen.picture, "image")]
            for word, values in maps.items():
                title = f"{word.replace('_', ' ')}\n{spread(values)}"
                row.append(Panel(title, values.cpu().float().numpy(), "heat", seen.picture))
            rows.append(row)
    return rows if request.block is not None else side_by_side(rows)


def side_by_side(rows: list[list[Panel]]) -> list[list[Panel]]:
    """Two rows in one where there are many."""
    if len(rows) < 4:
        return rows
    return [rows[index] + (rows[index + 1] if index + 1 < len(rows) else []) for index in range(0, len(rows), 2)]


def feature_sheet(source: Subject, seen: SeenImage, request: Request) -> list[list[Panel]]:
    """The first channels of a place, or a few of every stage."""
    if request.block is not None:
        maps = feature_maps(source, seen.pixels, request.block)[0, :MANY].cpu().float()
        panels = [Panel("image", seen.picture, "image")]
        panels += [Panel(f"channel {index}", one.numpy(), "heat") for index, one in enumerate(maps)]
        return wrapped(panels, COLUMNS)
    rows = []
    for name in stage_names(source):
        maps = feature_maps(source, seen.pixels, name)[0, :FIRST].cpu().float()
        row = [Panel(f"channel {index}", one.numpy(), "heat") for index, one in enumerate(maps)]
        rows.append([Panel(name, seen.picture, "image"), *row])
    return rows


def stage_names(source: Subject) -> list[str]:
    """The places behind the maps of the pyramid, and those of the last co-scale block."""
    if not isinstance(source.model, Backbone):
        return timm_places.feature_names(source.model) or timm_places.block_names(source.model)
    last = source.intermediate_names[-1].rpartition(".")[0] + "."
    parallel = [name for name in source.intermediate_names if name.startswith("coscale.") and name.startswith(last)]
    return [*dict.fromkeys(source.model.pyramid_names), *parallel]


def spread(values: Tensor) -> str:
    """The range of a map, for its title."""
    return f"{float(values.min()):.2g} to {float(values.max()):.2g}"


SHEETS: dict[str, Callable[[Subject, SeenImage, Request], list[list[Panel]]]] = {
    "attention": attention_sheet,
    "gates": gate_sheet,
    "features": feature_sheet,
}
