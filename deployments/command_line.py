"""One form for the `--help` of every command, and the texts of docstrings that it and tables show."""

from __future__ import annotations

import argparse
import inspect
import re
from pathlib import Path
from typing import Any


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Adds each default that is a value, and keeps the lines of description and example."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = isinstance(action.default, str | int | float | Path) and not isinstance(action.default, bool)
        if not shown or action.default == argparse.SUPPRESS or "default" in (action.help or ""):
            return action.help
        return f"{action.help or ''} (default: %(default)s)".lstrip()


def parser(module: str, text: str, example: str, **more: Any) -> argparse.ArgumentParser:
    """A parser for `python -m module`: one line on what the command does, and the arguments of an example."""
    prog = f"python -m {module}"
    return argparse.ArgumentParser(prog=prog, **form(text, f"{prog} {example}"), **more)


def form(text: str, example: str) -> dict[str, Any]:
    """The arguments of a parser, or of a subcommand's, for a line on what it does and an example."""
    more: dict[str, Any] = {"formatter_class": Formatter, "allow_abbrev": False}
    return more | {"description": text, "epilog": f"example:\n  {example}"}


def meanings(described: Any, section: str = "Attributes") -> dict[str, str]:
    """What a section of a docstring says of each name, on one line."""
    text = (inspect.getdoc(described) or "").partition(f"{section}:\n")[2].partition("\n\n")[0]
    parts = re.findall(r"^    (\S+): (.*(?:\n        .*)*)", text, re.MULTILINE)
    return {name: " ".join(meaning.split()).replace("|", "\\|") for name, meaning in parts}
