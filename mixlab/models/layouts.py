"""Translate the names and shapes that other code gives to parameters, by rules in `configs/layouts`."""

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
    """A key that matches `pattern` becomes `name` (empty: it is dropped) after a named conversion."""

    pattern: re.Pattern[str]
    name: str
    conversion: str = "as_it_is"


@functools.cache
def layouts() -> dict[str, list[Rule]]:
    """Read the rules of each layout from `configs/layouts`: its own, then those of the layout it `extends`."""
    read: dict[str, dict[str, Any]] = {}
    for file in (resources.files("mixlab") / "configs" / "layouts").iterdir():
        for source, layout in tomllib.loads(file.read_text(encoding="utf-8")).items():
            read[f"{file.name.removesuffix('.toml')} {source}"] = layout
    rules = {}
    for name, layout in read.items():
        rename = layout["rename"] + (read[layout["extends"]]["rename"] if "extends" in layout else [])
        rules[name] = [Rule(re.compile(pattern), *rest) for pattern, *rest in rename]
    return rules


def best_layout(origin: str, tensors: Mapping[str, Tensor], current: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under Mixlab's names, by the layout that explains most of the model."""
    candidates = [{key: [(key, value)] for key, value in tensors.items()}]
    for rules in layouts().values():
        candidates.append({key: convert(key, value, rules, current) for key, value in tensors.items()})
    best = max(
        candidates,
        key=lambda candidate: len(current.keys() & {name for pairs in candidate.values() for name, _ in pairs}),
    )
    renamed: dict[str, Tensor] = {}
    for key, pairs in best.items():
        for name, value in pairs:
            if name in renamed and not torch.equal(renamed[name], value):
                raise WeightsError(f"{origin} has two different tensors for {name}; {key!r} is the second.")
            renamed[name] = value
    return renamed


def convert(key: str, value: Tensor, rules: list[Rule], current: Mapping[str, Tensor]) -> Converted:
    """Return Mixlab's names and tensors for a key: none if it is dropped, several if Mixlab keeps it in parts."""
    for rule in rules:
        match = rule.pattern.fullmatch(key)
        if match:
            name = calculate(match.expand(rule.name))
            return CONVERSIONS[rule.conversion](name, value, current) if name else []
    return [(key, value)]


def calculate(name: str) -> str:
    """Replace every "<a*b+c>" in a name by its value."""
    return re.sub(r"<(\d+)\*(\d+)\+(\d+)>", lambda sums: str(int(sums[1]) * int(sums[2]) + int(sums[3])), name)


# -- conversions ---------------------------------------------------------------------------------


def as_it_is(name: str, value: Tensor, current: Mapping[str, Tensor]) -> Converted:
    return [(name, value)]


def plus_one(name: str, value: Tensor, current: Mapping[str, Tensor]) -> Converted:
    """Add the 1 to a factor that was stored as its distance from it."""
    return [(name, value + 1)]


def parts(name: str, value: Tensor, current: Mapping[str, Tensor]) -> Converted:
    """Split the rows of several layers in one tensor: "a.b|c.d" are equal shares for "a.b.d" and "a.c.d"."""
    *front, names, leaf = name.split(".")
    owners = names.split("|")
    if len(value) % len(owners):
        return [(name, value)]  # for the caller to report
    return [
        (".".join([*front, owner, leaf]), part) for owner, part in zip(owners, value.chunk(len(owners)), strict=True)
    ]


def position(name: str, value: Tensor, current: Mapping[str, Tensor]) -> Converted:
    """Split a table (1, class tokens + H*W, C) into the rows of class tokens and those of the image."""
    prefix = current.get(f"{name}.prefix")
    if prefix is None or value.ndim != 3:
        return [(f"{name}.table", value)]
    return [(f"{name}.prefix", value[:, : prefix.shape[1]]), (f"{name}.table", value[:, prefix.shape[1] :])]


def channels_last(name: str, value: Tensor, current: Mapping[str, Tensor]) -> Converted:
    """Turn a table (1, C, H, W) into (H, W, C)."""
    return [(name, value[0].permute(1, 2, 0) if value.ndim == 4 else value)]


def squeezed(name: str, value: Tensor, current: Mapping[str, Tensor]) -> Converted:
    """Remove the axes of 1 from a tensor."""
    return [(name, value.squeeze())]


CONVERSIONS: dict[str, Callable[[str, Tensor, Mapping[str, Tensor]], Converted]] = {
    "as_it_is": as_it_is,
    "plus_one": plus_one,
    "parts": parts,
    "position": position,
    "channels_last": channels_last,
    "squeezed": squeezed,
}
