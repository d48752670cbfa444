"""Tables that can be read in a terminal as in Markdown."""

from collections.abc import Sequence


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table whose columns are aligned."""
    widths = [max(3, *(len(row[i]) for row in (columns, *rows))) for i in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return [line(columns), line(["-" * width for width in widths]), *map(line, rows)]
