"""Tables that fit the terminal: columns are left out before names are cut."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

_BETWEEN = 3
"""Characters of a border and its padding."""
_WRAPPED_LEAST = 12
"""Width from which on a cell may be broken into lines."""


@dataclass(frozen=True, slots=True)
class Column:
    head: str
    right: bool = False
    rank: int = 0
    """Where the terminal is too narrow, columns of the highest rank go first; those of 0 stay."""
    wraps: bool = False
    """Its cells may be broken into lines, because they are sentences."""


class FittedTable:
    """A table for rich, whose cells are rich's markup."""

    def __init__(self, *columns: Column) -> None:
        self._columns = columns
        self._rows: list[tuple[str, ...]] = []

    def add_row(self, *cells: str) -> None:
        """Cells may be missing at the end."""
        self._rows.append((*cells, *("" for _ in range(len(self._columns) - len(cells)))))

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.table import Table
        from rich.text import Text

        rows = [[Text.from_markup(cell) for cell in row] for row in self._rows]
        shown, widths = self._fit(rows, options.max_width)
        table = Table(expand=False)
        for number in shown:
            column = self._columns[number]
            table.add_column(
                column.head, justify="right" if column.right else "left", overflow="fold",
                width=widths[number],
            )  # fmt: skip
        for row in rows:
            table.add_row(*(row[number] for number in shown))
        yield table

    def _fit(self, rows: Sequence[Sequence["Text"]], most: int) -> tuple[list[int], list[int]]:
        """Return the columns that are shown, and the width of each column."""
        widths = [
            max([len(column.head), *(row[number].cell_len for row in rows)])
            for number, column in enumerate(self._columns)
        ]
        least = [
            min(width, _WRAPPED_LEAST) if column.wraps else width
            for width, column in zip(widths, self._columns, strict=True)
        ]
        shown = list(range(len(self._columns)))

        def missing() -> int:
            return sum(least[number] + _BETWEEN for number in shown) + 1 - most

        while missing() > 0 and any(self._columns[number].rank for number in shown):
            shown.remove(max(shown, key=lambda number: (self._columns[number].rank, number)))
        room = -missing()
        for number in shown:
            more = max(0, min(room, widths[number] - least[number]))
            least[number] += more
            room -= more
        if room < 0:  # the first column has the names
            least[shown[0]] = max(_WRAPPED_LEAST, least[shown[0]] + room)
        return shown, least
