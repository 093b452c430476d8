"""What commands print: tables, sizes and times as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]], right: str = "") -> None:
    """Print rows as columns of text.

    Args:
        heads: The columns' names.
        rows: Their cells; None is a dash.
        right: Names of columns that stand to the right.
    """
    cells = [tuple(heads), *(tuple("-" if cell is None else _printable(str(cell)) for cell in row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    rights = [head in right.split() for head in heads]
    for row in cells:
        aligned = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, rights, strict=True)
        ]
        print("  ".join(aligned).rstrip())


def _printable(text: str) -> str:
    """A user's text on one line, with nothing that a terminal would obey."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def size(count: int) -> str:
    """Bytes as people say them: `812 B`, `1.5 MiB`."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def time(seconds: float) -> str:
    """Unix seconds as local time."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="seconds")
