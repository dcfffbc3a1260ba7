"""Which packages Mixlab asks for, by its own metadata, and which of them are installed."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(\[[^]]*])?\s*(>=\s*(?P<least>[\d.]+))?")
EXTRA = re.compile(r"extra\s*==\s*['\"](?P<extra>[\w-]+)['\"]")


@dataclass(frozen=True)
class Package:
    """A package that Mixlab asks for: always, or for one of its extras."""

    name: str
    extra: str | None
    least: str | None  # the oldest release that will do
    version: str | None  # the installed one; None: not installed

    @property
    def is_too_old(self) -> bool:
        return self.version is not None and self.least is not None and numbers(self.version) < numbers(self.least)


def packages() -> list[Package]:
    """What Mixlab asks for; empty where it runs from a folder without having been installed."""
    try:
        requirements = metadata.requires("mixlab") or []
    except metadata.PackageNotFoundError:
        return []
    return list(parse(requirements))


def parse(requirements: list[str]) -> Iterator[Package]:
    for text in requirements:
        requirement, extra = REQUIREMENT.match(text), EXTRA.search(text)
        if requirement is not None and requirement["name"] != "mixlab":  # an extra that includes another
            name = requirement["name"]
            yield Package(name, extra and extra["extra"], requirement["least"], version_of(name))


def version_of(name: str) -> str | None:
    """The installed release of a package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """The numbers in front of anything else: (2, 6, 0) of "2.6.0+cpu"."""
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in leading[0].split(".")) if leading else ()
