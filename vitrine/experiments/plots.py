"""Heat maps and bars with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def heat_map(
    values: npt.NDArray[Any],
    rows: Sequence[Any],
    columns: Sequence[Any],
    *,
    title: str,
    labels: tuple[str, str],
    path: str | Path | None,
    centred: bool = False,
    texts: Sequence[Sequence[str]] | None = None,
    faint: npt.NDArray[np.bool_] | None = None,
) -> Any:
    """A heat map as a matplotlib figure, which a notebook shows if it is a cell's last value.

    Args:
        values: `[rows, columns]`.
        rows: Names of the rows, the first at the bottom.
        columns: Names of the columns.
        title: The title.
        labels: The labels of the column axis and of the row axis.
        path: A file to write, whose suffix is the format.
        centred: Whether 0 is in the middle of the colour scale.
        texts: A short text for each cell.
        faint: `[rows, columns]`: the cells to mark by a grey dot.

    Raises:
        ImportError: matplotlib is not installed.
    """
    height = min(max(2.5, 1.2 + 0.22 * len(rows)), 30.0)  # heads of all layers are many rows
    figure = _figure(max(4.0, 1.5 + 0.45 * len(columns)), height)
    axes = figure.subplots()
    most = float(np.nanmax(np.abs(values), initial=0)) or 1.0
    limits = {"vmin": -most, "vmax": most, "cmap": "RdBu_r"} if centred else {"cmap": "viridis"}
    image = axes.imshow(values, aspect="auto", origin="lower", **limits)
    axes.set_xticks(range(len(columns)), [str(name) for name in columns], rotation=60, ha="right")
    step = max(1, len(rows) // 16)
    axes.set_yticks(range(0, len(rows), step), [str(name) for name in rows[::step]])
    axes.set(title=title, xlabel=labels[0], ylabel=labels[1])
    for row, line in enumerate(texts or ()):
        for column, text in enumerate(line):
            shade: Any = image.norm(values[row, column])
            axes.text(column, row, text, ha="center", va="center", fontsize=6, color="w" if shade < 0.6 else "k")
    if faint is not None:
        axes.plot(*np.nonzero(faint)[::-1], ".", color="grey", markersize=4)
    figure.colorbar(image)
    return _saved(figure, path)


def bars(
    values: npt.NDArray[Any], names: Sequence[str], *, title: str, label: str, path: str | Path | None = None
) -> Any:
    """Horizontal bars, the first at the top, as a matplotlib figure; raises ImportError without matplotlib."""
    figure = _figure(6.0, 1.2 + 0.22 * len(names))
    axes = figure.subplots()
    axes.barh(range(len(names)), values, color=["tab:red" if value > 0 else "tab:blue" for value in values])
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(title=title, xlabel=label)
    return _saved(figure, path)


def _figure(width: float, height: float) -> Any:
    """An empty figure of a size in inches."""
    from matplotlib.figure import Figure

    class Picture(Figure):
        # Notebooks show figures only once pyplot has chosen a backend, which is the program's choice.
        def _repr_png_(self) -> bytes:
            buffer = BytesIO()
            self.savefig(buffer, format="png", bbox_inches="tight")
            return buffer.getvalue()

    return Picture(figsize=(width, height), layout="constrained")


def _saved(figure: Any, path: str | Path | None) -> Any:
    if path is not None:
        figure.savefig(path, dpi=150, bbox_inches="tight")
    return figure


def shown(token: str) -> str:
    """A token's text with visible spaces and line breaks."""
    return token.replace(" ", "·").replace("\n", "↵").replace("$", r"\$")
