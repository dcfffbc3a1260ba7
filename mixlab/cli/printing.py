"""Tables and numbers for terminals and pipes."""

import sys
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from mixlab.core.errors import ConfigError

Row = Sequence[str]


def parse_size(text: str) -> tuple[int, int]:
    """'384' or '384x256' as (height, width)."""
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() for side in sides):
        raise ConfigError(f"An image size is a side such as 384, or HEIGHTxWIDTH such as 384x256; got {text!r}.")
    return int(sides[0]), int(sides[-1])


def millions(count: int, digits: int = 1) -> str:
    return f"{count / 1e6:.{digits}f}"


def with_frozen(params: int, frozen: int, digits: int) -> str:
    """Trainable parameters, and behind a plus those that are never trained."""
    return millions(params, digits) + (f" + {millions(frozen, digits)}" if frozen else "")


def billions(count: int, digits: int = 2) -> str:
    return f"{count / 1e9:.{digits}f}"


def wide_open() -> bool:
    """Whether a person watches: no progress bars into pipes."""
    return sys.stderr.isatty()


def show(header: Row, rows: Iterable[Row], *, right: Iterable[int]) -> None:
    """A table; in a pipe without lines, colors or cut cells."""
    to_person = sys.stdout.isatty()
    table = Table(box=box.SIMPLE_HEAD if to_person else None, pad_edge=False, header_style="bold")
    for index, title in enumerate(header):
        table.add_column(title, justify="right" if index in set(right) else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # a narrow terminal wraps long lines: names and numbers are never cut
    Console(width=200 if to_person else 1000, soft_wrap=True).print(table)
