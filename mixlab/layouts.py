"""How other code names the parameters: the rules are data in `configs/layouts`."""

import functools
import re
import tomllib
from collections.abc import Mapping
from importlib import resources

import torch
from torch import Tensor

from mixlab.errors import WeightsError

Rules = list[tuple[re.Pattern[str], str]]


@functools.cache
def layouts() -> dict[str, Rules]:
    """How other code names the parameters, from `configs/layouts`."""
    found: dict[str, Rules] = {}
    for file in (resources.files("mixlab") / "configs" / "layouts").iterdir():
        for source, layout in tomllib.loads(file.read_text(encoding="utf-8")).items():
            rules = [(re.compile(pattern), name) for pattern, name in layout["rename"]]
            found[f"{file.name.removesuffix('.toml')} {source}"] = rules
    return found


def rename(key: str, rules: Rules) -> str:
    """Our name for a key; empty if it is to be dropped."""
    for pattern, name in rules:
        match = pattern.fullmatch(key)
        if match:
            return match.expand(name)
    return key


def best_layout(origin: str, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under our names, by the layout that explains most of the keys."""
    candidates = [{key: key for key in tensors}]
    candidates += [{key: rename(key, rules) for key in tensors} for rules in layouts().values()]
    names = max(candidates, key=lambda names: len(own.keys() & set(names.values())))
    renamed: dict[str, Tensor] = {}
    for key, value in tensors.items():
        name = names[key]
        if name in renamed and not torch.equal(renamed[name], value):
            raise WeightsError(f"{origin} has two different tensors for {name}; {key!r} is the second.")
        if name:
            renamed[name] = value
    return renamed
