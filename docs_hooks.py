"""The generated parts of the documentation; mkdocs.yml names this file."""

from __future__ import annotations

import argparse
import base64
import copy
import csv
import inspect
import json
import os
import pkgutil
import re
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import vitrine
from deployments.command_line import meanings
from deployments.options_table import table

ROOT = Path(__file__).parent


@event_priority(100)  # before the plugin redirects looks for them
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each notebook in `examples/`."""
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        text, pictures = notebook(path)
        files.append(File.generated(config, f"cookbook/{path.stem}.md", content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, f"cookbook/{name}", content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replaces each marker by its text, and links to notebooks by links to their pages."""
    markdown = re.sub(r"\(((?:cookbook/)?[\w-]+)\.ipynb\b", r"(\1.md", markdown)
    return re.sub(r"<!-- generated: (\w+)(?: (\S+))? -->", lambda found: GENERATED[found[1]](found[2]), markdown)


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Links the pages that docstrings name."""
    if page.file.src_uri != "reference.md":
        return html
    return re.sub(r"\bdocs/([\w-]+)\.md", r'<a href="../\1/">docs/\1.md</a>', html)


def notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook's cells and outputs in Markdown, and its pictures by name."""
    parts, pictures = [], dict[str, bytes]()
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.replace("](../docs/", "](../"))
        elif not source.startswith("%cd"):
            language = "sh" if source.startswith("%%bash") else "python"
            parts.append(f"```{language}\n{re.sub('^%%bash.*', '', source).lstrip()}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if picture := data.get("image/png"):
                name = f"{path.stem}-{number}.png"
                pictures[name] = base64.b64decode("".join(picture))
                parts.append(f"![The plot that this code draws]({name})")
            elif text := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
                parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts) + "\n", pictures


def command(module: str) -> str:
    """The `--help` of a command and of its subcommands."""
    os.environ["COLUMNS"] = "96"
    parser = import_module(module).command()
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    parsers = [parser, *(found for action in nested for found in action.choices.values())]
    return "\n\n".join(f"```text\n{one.format_help().rstrip()}\n```" for one in parsers)


def fields(name: str) -> str:
    """What the docstring of a class, a function or a package says of each field that it describes."""
    described = pkgutil.resolve_name(name)
    (section,) = re.findall("^(Attributes|Files|Returns):$", inspect.getdoc(described) or "", re.MULTILINE)
    return _table(("name", "meaning"), ((f"`{field}`", text) for field, text in meanings(described, section).items()))


def csv_table(name: str) -> str:
    """A file of `docs/` as a table."""
    with (ROOT / "docs" / name).open(encoding="utf-8", newline="") as file:
        heads, *rows = csv.reader(file)
    return _table(heads, rows)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *rows))


GENERATED: dict[str, Callable[[str], str]] = {
    "architectures": lambda _: csv_table("architectures.csv"),
    "command": command,
    "fields": fields,
    "options": lambda _: table(),
    "python": lambda _: "\n\n".join(
        f"::: vitrine.{module}.{name}" for name, module in vitrine._MODULES.items() if name != "AsyncServer"
    ),
}


class Blocking(griffe.Extension):
    """Shows the methods of `Server`, which are blocking versions of those of `AsyncServer`, with their signatures."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Puts a function in place of each `blocking(...)`."""
        server, asynchronous = pkg["server.Server"], pkg["server.AsyncServer"]
        for name, member in server.members.items():
            if member.is_attribute and str(member.value).startswith("blocking("):
                method = asynchronous.inherited_members[name].final_target
                server.members[name] = method = copy.copy(method)
                method.parent, method.lineno, method.labels = server, member.lineno, method.labels - {"async"}
