"""Tables as pages show them: a text for people and a value to sort by in every cell."""

from collections.abc import Sequence
from dataclasses import dataclass

from mixlab.findings.findings import Cell as Value
from mixlab.findings.findings import Finding, show_cell
from mixlab.findings.results import Comparison
from mixlab.report.table import cells, columns_of

WIDE = 10  # columns; a table with more is rid of those that say nothing


@dataclass(frozen=True)
class PageCell:
    """`value` is what a click on the head sorts by: a number, a text, or None for what is missing, always last."""

    text: str
    value: float | str | None
    best: bool = False


@dataclass(frozen=True)
class PageRow:
    cells: Sequence[PageCell]  # the first one names the row
    tag: str = ""  # a word that marks the row out
    link: str = ""  # where the name leads to


@dataclass(frozen=True)
class PageTable:
    heads: Sequence[str]
    rows: Sequence[PageRow]
    falling: int | None = None  # the column by which the rows are in falling order already

    @property
    def words(self) -> list[bool]:
        """Columns that hold texts, which stand to the left; numbers stand to the right."""
        columns = zip(*(row.cells for row in self.rows), strict=True)
        found = [any(isinstance(cell.value, str) for cell in column) for column in columns]
        return found or [False] * len(self.heads)


def page_cell(value: Value, text: str | None = None) -> PageCell:
    """A value as it sorts, and its text, by default as every finding shows it."""
    sorts = str(show_cell(value)) if isinstance(value, bool) else value
    return PageCell(show_cell(value) if text is None else text, sorts)


def finding_table(found: Finding) -> tuple[PageTable, dict[str, Value]]:
    """Without empty columns; those of a wide table that hold the same in every row are returned apart."""
    columns = [(name, [row[index] for row in found.table]) for index, name in enumerate(found.columns)]
    shown = columns[:1] + [(name, cells) for name, cells in columns[1:] if not found.table or set(cells) - {None, ""}]
    same: dict[str, Value] = {}
    if len(shown) > WIDE and len(found.table) > 1:
        same = {name: cells[0] for name, cells in shown[1:] if len(set(cells)) == 1}
        shown = shown[:1] + [(name, cells) for name, cells in shown[1:] if name not in same]
    rows = [PageRow([page_cell(cells[index]) for _, cells in shown]) for index in range(len(found.table))]
    return PageTable([name for name, _ in shown], rows), same


def comparison_table(comparison: Comparison, chosen: str | None) -> PageTable:
    """Most accurate first; the recommended model is marked."""
    heads = [column.label for column in columns_of(comparison)]
    rows = [
        PageRow(
            [page_cell(name), *(PageCell(cell.text, cell.value, cell.best) for cell in row)],
            tag="recommended" if name == chosen else "",
        )
        for name, row in cells(comparison).items()
    ]
    return PageTable(["model", *heads], rows, falling=1 if heads[0] == "top-1 %" else None)
