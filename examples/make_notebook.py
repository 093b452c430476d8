"""Make the notebooks of docs' pages: `python examples/make_notebook.py` writes examples/tutorial.ipynb and others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
RECIPES = ("recall", "refusal", "monitor", "lenses", "errors")  # the sections of docs/cookbook.md
FIRST = "%cd -q .."  # the page's commands begin in the project's directory


def sources() -> Iterator[tuple[Path, str]]:
    """Each notebook and its text: a whole page, or the beginning of the cookbook and one of its sections."""
    for name in ("tutorial", "experiments"):
        yield HERE / f"{name}.ipynb", (DOCS / f"{name}.md").read_text()
    start, *sections = re.split(r"^(?=## )", (DOCS / "cookbook.md").read_text(), flags=re.MULTILINE)
    for name, section in zip(RECIPES, sections, strict=True):
        yield HERE / f"{name}.ipynb", start + section


def notebook(page: str) -> dict[str, Any]:
    """A page's text as markdown cells, its commands and Python as code cells; `serve run` in the background."""
    cells = [_cell("code", FIRST)]
    for text, language, code in re.findall(r"(.*?)(?:^```(sh|python)\n(.*?)^```\n|\Z)", page, re.DOTALL | re.MULTILINE):
        if text.strip():
            cells.append(_cell("markdown", re.sub(r"\]\((?!http|#)", "](../docs/", text).strip()))
        if code:
            magic = "%%bash --bg\n" if code.startswith("serve run") else "%%bash\n" if language == "sh" else ""
            cells.append(_cell("code", magic + code.strip()))
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    numbered = [{"id": f"cell-{number}", **cell} for number, cell in enumerate(cells)]
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": kernel, "cells": numbered}


def _cell(kind: str, source: str) -> dict[str, Any]:
    outputs = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {}, "source": source.splitlines(keepends=True), **outputs}


if __name__ == "__main__":
    for path, page in sources():
        path.write_text(json.dumps(notebook(page), indent=1, ensure_ascii=False, sort_keys=True) + "\n")
