"""How other code names and stores the parameters: the rules are data in `configs/layouts`."""

import functools
import re
import tomllib
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mixlab.core.errors import WeightsError

Converted = list[tuple[str, Tensor]]


class Rule(NamedTuple):
    """A key that matches `pattern` is our `name`, empty if it is to be dropped, after a named conversion."""

    pattern: re.Pattern[str]
    name: str
    conversion: str = "as_it_is"


@functools.cache
def layouts() -> dict[str, list[Rule]]:
    """How other code names the parameters, from `configs/layouts`: own rules first, then those it `extends`."""
    read: dict[str, dict[str, Any]] = {}
    for file in (resources.files("mixlab") / "configs" / "layouts").iterdir():
        for source, layout in tomllib.loads(file.read_text(encoding="utf-8")).items():
            read[f"{file.name.removesuffix('.toml')} {source}"] = layout
    found = {}
    for name, layout in read.items():
        rename = layout["rename"] + (read[layout["extends"]]["rename"] if "extends" in layout else [])
        found[name] = [Rule(re.compile(pattern), *rest) for pattern, *rest in rename]
    return found


def best_layout(origin: str, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under our names, by the layout that explains most of the model."""
    candidates = [{key: [(key, value)] for key, value in tensors.items()}]
    for rules in layouts().values():
        candidates.append({key: convert(key, value, rules, own) for key, value in tensors.items()})
    best = max(candidates, key=lambda found: len(own.keys() & {name for pairs in found.values() for name, _ in pairs}))
    renamed: dict[str, Tensor] = {}
    for key, pairs in best.items():
        for name, value in pairs:
            if name in renamed and not torch.equal(renamed[name], value):
                raise WeightsError(f"{origin} has two different tensors for {name}; {key!r} is the second.")
            renamed[name] = value
    return renamed


def convert(key: str, value: Tensor, rules: list[Rule], own: Mapping[str, Tensor]) -> Converted:
    """Our names and tensors for a key: usually one, none if it is to be dropped, several if we keep it in parts."""
    for rule in rules:
        match = rule.pattern.fullmatch(key)
        if match:
            name = calculate(match.expand(rule.name))
            return CONVERSIONS[rule.conversion](name, value, own) if name else []
    return [(key, value)]


def calculate(name: str) -> str:
    """A name with every "<a*b+c>" as its value."""
    return re.sub(r"<(\d+)\*(\d+)\+(\d+)>", lambda sums: str(int(sums[1]) * int(sums[2]) + int(sums[3])), name)


# -- conversions ---------------------------------------------------------------------------------


def as_it_is(name: str, value: Tensor, own: Mapping[str, Tensor]) -> Converted:
    return [(name, value)]


def plus_one(name: str, value: Tensor, own: Mapping[str, Tensor]) -> Converted:
    """A factor that was stored as its distance from 1."""
    return [(name, value + 1)]


def parts(name: str, value: Tensor, own: Mapping[str, Tensor]) -> Converted:
    """Rows of several layers in one tensor: "a.b|c.d" are equal shares for "a.b.d" and "a.c.d"."""
    *front, names, leaf = name.split(".")
    owners = names.split("|")
    if len(value) % len(owners):
        return [(name, value)]  # for the caller to report
    return [
        (".".join([*front, owner, leaf]), part) for owner, part in zip(owners, value.chunk(len(owners)), strict=True)
    ]


def position(name: str, value: Tensor, own: Mapping[str, Tensor]) -> Converted:
    """One table (1, class tokens + H*W, C): the class tokens' rows and the image's."""
    prefix = own.get(f"{name}.prefix")
    if prefix is None or value.ndim != 3:
        return [(f"{name}.table", value)]
    return [(f"{name}.prefix", value[:, : prefix.shape[1]]), (f"{name}.table", value[:, prefix.shape[1] :])]


def channels_last(name: str, value: Tensor, own: Mapping[str, Tensor]) -> Converted:
    """A table (1, C, H, W) as (H, W, C)."""
    return [(name, value[0].permute(1, 2, 0) if value.ndim == 4 else value)]


def squeezed(name: str, value: Tensor, own: Mapping[str, Tensor]) -> Converted:
    """A tensor without its axes of 1."""
    return [(name, value.squeeze())]


CONVERSIONS: dict[str, Callable[[str, Tensor, Mapping[str, Tensor]], Converted]] = {
    "as_it_is": as_it_is,
    "plus_one": plus_one,
    "parts": parts,
    "position": position,
    "channels_last": channels_last,
    "squeezed": squeezed,
}
