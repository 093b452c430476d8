"""Notebooks and pages as programs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

NOTEBOOKS = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "examples").glob("*.ipynb"))}
COMMAND = "import subprocess; subprocess.run(['bash', '-euc', {!r}], check=True)"
ELSEWHERE = ("%cd -q ..", "%%bash --bg\nmkdir -p results", "%%bash\ncurl -sfo")  # the test's directory and server


def code_cells(name: str) -> list[dict[str, Any]]:
    return [cell for cell in NOTEBOOKS[name]["cells"] if cell["cell_type"] == "code"]


def cells(name: str) -> list[str]:
    """The code of `examples/<name>.ipynb`, without the cells that start a server."""
    sources = ["".join(cell["source"]) for cell in code_cells(name)]
    code = [source for source in sources if not source.startswith(ELSEWHERE)]
    assert len(code) == len(sources) - len(ELSEWHERE)
    return code


def blocks(page: Path) -> list[str]:
    """The commands and the Python of a page, as cells."""
    found = re.findall(r"^```(sh|python)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [f"%%bash\n{code}" if language == "sh" else code for language, code in found]


def run(code: list[str], directory: Path, env: dict[str, str], changed: Mapping[str, str]) -> str:
    """Run cells in a directory that has the examples, as a program of their own.

    Args:
        code: The cells.
        directory: Where; it gets links to the files that notebooks read.
        env: The program's environment.
        changed: Texts of the cells, and what stands for them in the test.

    Returns:
        What they printed.
    """
    (directory / "results").mkdir(exist_ok=True)
    for name in ("examples", "constraints.txt"):
        (directory / name).symlink_to(ROOT / name)
    lines = (COMMAND.format(cell.removeprefix("%%bash\n")) if cell.startswith("%%bash\n") else cell for cell in code)
    text = "\n".join(lines)
    for old, new in changed.items():
        assert old in text, f"there is no {old!r}"
        text = text.replace(old, new)
    script = directory / "notebook.py"
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, script],
        cwd=directory,
        env=env | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
