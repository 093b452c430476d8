"""Render the JSON of `benchmarks/results/` as tables in `benchmarks/RESULTS.md`: `python -m benchmarks.results`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

TARGET = Path(__file__).parent / "RESULTS.md"
HEAD = """# Results

`python -m benchmarks.results` generates this page from the files in `benchmarks/results/`; do not edit it.
[gpu.md](gpu.md) describes the sections of a GPU's file, and [the summary](../docs/internals.md) the conclusions.
"""
DETAILS = {"signatures", "by line", "syncs by line", "longest kernels, ms"}  # only in the files


def main(arguments: list[str] | None = None) -> None:
    """Write the page."""
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    TARGET.write_text(rendered(sorted((TARGET.parent / "results").glob("*.json"))))


def rendered(files: Iterable[Path]) -> str:
    """The page: a heading for each file, and tables for each section of a GPU's, or case of another benchmark's."""
    parts = [HEAD]
    for path, found in [(path, json.loads(path.read_text())) for path in files]:
        parts.append(f"## {path.stem}\n\nMachine: {_text(found.get('machine') or found['device'])}\n")
        for title, section in sorted((found.get("sections") or found["cases"]).items()):
            parts += [f"### {title}\n", *_tables(section)]
    return "\n".join(parts)


def _tables(section: Mapping[str, Any]) -> Iterator[str]:
    """A table for objects with the same names, and a line for single values."""
    cells = {name: value if isinstance(value, dict) else {} for name, value in section.items() if name not in DETAILS}
    for names, group in groupby(cells, lambda cell: tuple(name for name in cells[cell] if name not in DETAILS)):
        if names:
            rows = [["case", *names], ["---"] * (len(names) + 1)]
            rows += [[cell, *(_text(cells[cell][name]) for name in names)] for cell in group]
            yield "".join(f"|{'|'.join(row)}|\n" for row in rows).replace("floor", "roofline")
        else:
            yield _text({name: section[name] for name in group}) + "\n"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_text(part)}" for name, part in value.items())
    if isinstance(value, list) and value and isinstance(value[0], float):  # rounds of a benchmark
        return f"{median(value):,.4g} ({min(value):,.4g} to {max(value):,.4g})"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if not number else f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
