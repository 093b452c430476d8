"""Run notebooks and save their outputs: `make notebooks`, or `python examples/run_notebooks.py recall errors`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent.resolve()


def run(path: Path) -> None:
    """Run a notebook's cells in their order, from its directory, and save it with their outputs."""
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": HERE}}
    NotebookClient(notebook, timeout=None, record_timing=False, coalesce_streams=True, resources=resources).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [kept(output) for output in cell.outputs if is_result(output)]
    notebook.metadata.pop("language_info", None)
    nbformat.write(notebook, path)


def is_result(output: dict[str, Any]) -> bool:
    """Whether an output is printed, or a cell's value: warnings and progress are not saved."""
    return output["output_type"] == "execute_result" or output.get("name") == "stdout"


def kept(output: Any) -> Any:
    """An output without the paths of this machine."""
    if "text" in output:
        output["text"] = output["text"].replace(f"{HERE.parent}/", "").replace(str(Path.home()), "~")
    return output


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(path.stem for path in HERE.glob("*.ipynb")):
        run(HERE / f"{name}.ipynb")
