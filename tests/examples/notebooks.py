"""Notebooks as programs."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.conftest import ROOT

MAKER = runpy.run_path(str(ROOT / "examples" / "make_notebook.py"))
SOURCES: dict[Path, str] = dict(MAKER["sources"]())
COMMAND = "import subprocess; subprocess.run(['bash', '-euc', {!r}], check=True)"


def cells(name: str) -> list[str]:
    """The code cells of `examples/<name>.ipynb`."""
    found = json.loads((ROOT / "examples" / f"{name}.ipynb").read_text())["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


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
        assert old in text, f"the notebook no longer says {old!r}"
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
