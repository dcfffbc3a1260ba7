"""Maps from inside a model of timm: where its stages and blocks are, and the output of any module as an NCHW map."""

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from mixlab.core.errors import ConfigError, near_misses

# names of modules that hold no blocks, whatever lists they are made of
OUTSIDE = ("stem", "patch_embed", "downsample", "head", "pool", "final_conv", "norm", "fc", "classifier")
LISTS = (nn.Sequential, nn.ModuleList)
UNPADDED = 3  # rows that unpadded convolutions may have taken off a grid, as in Inception


# -- names ---------------------------------------------------------------------------------------


def feature_names(model: nn.Module) -> list[str]:
    """Return the modules whose outputs timm calls the features of a model, from the image to the head."""
    modules = dict(model.named_modules())
    listed = getattr(model, "feature_info", None) or ()
    return [entry["module"] for entry in listed if entry["module"] and entry["module"] in modules]


def stage_names(model: nn.Module) -> list[str]:
    """Return the features behind the first block: the stem's map, which timm may count as one, is left out."""
    features, blocks = feature_names(model), block_names(model)
    order = [name for name, _ in outputs_in_order(model)]
    first = order.index(blocks[0]) if blocks else 0
    return [name for name in features if order.index(name) >= first]


def block_names(model: nn.Module) -> list[str]:
    """Return the blocks of a model in order: `layer1.0` of a ResNet, `layers.0.blocks.0` of a Swin.

    A block is a module with parts of its own in a list of modules, or in a stage whose parts are numbered.
    """
    names = list(blocks_within(model))
    features = feature_names(model)
    order = [name for name, _ in outputs_in_order(model)]
    last = order.index(features[-1]) if features else len(order)
    return [name for name in names if order.index(name) <= last] or names


def place_names(model: nn.Module) -> list[str]:
    """Return stages and blocks in the order of their outputs: a stage comes after its blocks."""
    offered = {*feature_names(model), *block_names(model)}
    return [name for name, _ in outputs_in_order(model) if name in offered]


def blocks_within(module: nn.Module, path: str = "") -> Iterator[str]:
    parts = [(name, part) for name, part in module.named_children() if not name.startswith(OUTSIDE)]
    listing = isinstance(module, LISTS) or is_numbered(parts)
    for name, part in parts:
        if not any(True for _ in part.children()):
            continue  # a layer, not a block
        within = f"{path}.{name}" if path else name
        nested = listing or not path or (isinstance(part, LISTS) and name.startswith("blocks"))
        inner = list(blocks_within(part, within)) if nested else []
        if inner:
            yield from inner
        elif listing and not isinstance(part, LISTS):
            yield within


def is_numbered(parts: Sequence[tuple[str, nn.Module]]) -> bool:
    """Return whether a module is a list in all but name: parts of one class, called b1, b2, ... as in RegNet."""
    starts = {name.rstrip("0123456789") for name, _ in parts}
    classes = {type(part) for _, part in parts}
    return len(starts) == len(classes) == 1 and [name for name, _ in parts] == [
        f"{start}{number}" for start in starts for number in range(1, len(parts) + 1)
    ]


def outputs_in_order(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield every submodule after its parts, as their outputs come."""
    for name, part in module.named_children():
        within = f"{path}.{name}" if path else name
        yield from outputs_in_order(part, within)
        yield within, part


# -- maps ----------------------------------------------------------------------------------------


def maps_at(model: nn.Module, images: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the outputs of named modules as NCHW maps (B, C, H, W); gradients reach the images."""
    outputs: dict[str, list[Any]] = {name: [] for name in names}
    with listening(model, {name: outputs[name].append for name in outputs}):
        model(images)
    return {name: map_at(model, name, calls, images) for name, calls in outputs.items()}


def map_at(model: nn.Module, name: str, calls: Sequence[Any], images: Tensor) -> Tensor:
    """Return the only output of a module as a map; where it is none, timm may have a map of the same name."""
    found = as_map(model, calls, images)
    if isinstance(found, Tensor):
        return found
    listed = [entry["module"] for entry in getattr(model, "feature_info", None) or ()]
    if name in listed and hasattr(model, "forward_intermediates"):
        wanted = {"indices": [listed.index(name)], "intermediates_only": True, "output_fmt": "NCHW"}
        feature: Tensor = model.forward_intermediates(images, **wanted)[0]  # type: ignore[operator]
        return feature
    offered = [place for place in place_names(model) if place != name]
    around = [place for place in offered if name.startswith(f"{place}.")]
    others = [place for place in offered if place.split(".")[0] == name.split(".")[0]]
    raise ConfigError(f"{name!r} of timm's {title(model)} {found}. {near_misses(name, around or others or offered)}")


def title(model: nn.Module) -> str:
    return repr(getattr(model, "pretrained_cfg", {}).get("architecture", type(model).__name__))


def check_module(model: nn.Module, name: str, others: Iterable[str] = ()) -> None:
    """Raise a ConfigError with near misses, also among other names, if a model of timm has no such module."""
    modules = [known for known, _ in outputs_in_order(model)]
    if name not in modules:
        known = [*modules, *others]
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        told = near_misses(name, known if close else [*place_names(model), *others])
        raise ConfigError(f"timm's {title(model)} has no module {name!r} to take a map from. {told}")


@contextmanager
def listening(model: nn.Module, listeners: Mapping[str, Callable[[Any], None]]) -> Iterator[None]:
    """Tell listeners what named modules give, as it is before a later layer may change it in place."""

    def hook(listener: Callable[[Any], None]) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, inputs, output: listener(output.clone() if isinstance(output, Tensor) else output)

    for name in listeners:
        check_module(model, name)
    modules = dict(model.named_modules(remove_duplicate=False))
    handles = [modules[name].register_forward_hook(hook(listener)) for name, listener in listeners.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def as_map(model: nn.Module, calls: Sequence[Any], images: Tensor) -> Tensor | str:
    """Return what a module gave in one forward pass as (B, C, H, W), or in words why it is no map of the image."""
    if len(calls) != 1:
        return f"runs {len(calls)} times in one forward pass" if calls else "takes no part in the forward pass"
    output, (count, _, height, width) = calls[0], images.shape
    if not isinstance(output, Tensor):
        return f"gives no tensor but a {type(output).__name__}"
    if output.ndim == 3 and hasattr(model, "unroll"):
        return "gives tokens in an order of its own (mask units)"
    found = None
    if len(output) == count and output.ndim == 4:
        found = channels_first(output, (height, width), getattr(model, "output_fmt", "NCHW"))
    elif len(output) == count and output.ndim == 3:
        found = tokens_as_map(output, (height, width), prefixes(model))
    shape = " x ".join(map(str, output.shape))
    return f"gives {shape} for {count} images of {height} x {width} px: no map of them" if found is None else found


def channels_first(output: Tensor, image_size: tuple[int, int], declared: str) -> Tensor | None:
    """Return (B, C, H, W) or (B, H, W, C) as (B, C, H, W); None if neither reading fits the image.

    Both fit if a map has as many channels as rows: then the layout that the model declares is believed.
    """
    first, second, third = output.shape[1:]
    last_two, first_two = is_grid(second, third, image_size), is_grid(first, second, image_size)
    if last_two and first_two:
        last_two = declared != "NHWC"
    if last_two:
        return output
    return output.permute(0, 3, 1, 2) if first_two else None


def prefixes(model: nn.Module) -> list[int]:
    """Return how many tokens may precede those of the image: as declared, a class token, or none before it joins."""
    class_token = any(name.startswith("cls_token") for name, _ in model.named_parameters())
    return list(dict.fromkeys((getattr(model, "num_prefix_tokens", 0), int(class_token), 0)))


def tokens_as_map(output: Tensor, image_size: tuple[int, int], prefixes: Sequence[int]) -> Tensor | None:
    """Return tokens (B, prefix + H * W, C) as (B, C, H, W) without class tokens and registers, the prefix."""
    for prefix in prefixes:
        grid = grid_of(output.shape[1] - prefix, image_size)
        if grid is not None:
            return output[:, prefix:].unflatten(1, grid).permute(0, 3, 1, 2)
    return None


def grid_of(count: int, image_size: tuple[int, int]) -> tuple[int, int] | None:
    """Return the rows and columns of so many tokens: of those that fit the image, the nearest to its proportions."""
    fitting = [
        (rows, count // rows)
        for rows in range(1, count + 1)
        if count % rows == 0 and is_grid(rows, count // rows, image_size)
    ]
    wanted = math.log(image_size[0] / image_size[1])
    return min(fitting, key=lambda grid: abs(math.log(grid[0] / grid[1]) - wanted), default=None)


def is_grid(rows: int, columns: int, image_size: tuple[int, int]) -> bool:
    """Return whether cells of some whole number of pixels cover the image in so many rows and columns."""
    height, width = image_size
    if (height == width) != (rows == columns) and height == width:
        return False
    return any(
        all(math.ceil(side / stride) >= cells >= max(1, side / stride - UNPADDED) for side, cells in sides)
        for stride in range(1, max(height, width) + 1)
        for sides in [((height, rows), (width, columns))]
    )
