"""Grids and blocks of commands in Markdown."""

from collections.abc import Iterable, Mapping, Sequence

DAYS = "days on GPUs, and data of your own"


def grid(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """A table without the columns that are empty; nothing without lines."""
    lines = list(lines)
    if not lines:
        return []
    full = [index for index in range(len(titles)) if any(line[index] for line in lines)]
    rows = [[line[index] for index in full] for line in (titles, ["---"] * len(titles), *lines)]
    return [*("| " + " | ".join(cells) + " |" for cells in rows), ""]


def number(value: float | None) -> str:
    """Two or three digits of a value."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def block(commands: Iterable[str], reason: str = DAYS) -> list[str]:
    """Commands that a test parses, with the reason why it does not run them as they are; nothing without any."""
    commands = list(commands)
    return [f"<!-- parse only: {reason} -->", "```sh", *commands, "```", ""] if commands else []


def earlier(runs: Iterable[str], table: str, printed: Mapping[str, str]) -> list[str]:
    """Where the commands of runs are that another table has in common with this one."""
    places = {run: printed[run] for run in runs}
    others = " and ".join(sorted(set(places.values()) - {table}))
    if not others:
        return []
    which = "the other rows" if table in places.values() else "these rows"
    return [f"The commands of {which} are in {others}.", ""]
