"""Tables of figures in bench/results/, each with the machine and the command that made it."""

from pathlib import Path

from comparison.tables import table_lines
from comparison.timing import machine

RESULTS = Path(__file__).parent / "results"


def write_table(name: str, title: str, command: str, columns: list[str], rows: list[list[str]]) -> Path:
    """Write a Markdown table to bench/results/."""
    lines = [f"# {title}", "", f"Measured on {machine()}, with `{command}`.", "", *table_lines(columns, rows)]
    path = RESULTS / f"{name}.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
