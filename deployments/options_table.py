"""Makes `docs/options.md` from `Options`: `python -m deployments.options_table > docs/options.md`."""

from __future__ import annotations

import inspect
import re
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from deployments.options import Options, home

HEAD = """# Options

Set an option in one of these places:

- `serve run serve_app:build_app name=value ...`, where lists and objects are JSON,
- `args` in a file for `serve deploy`, such as `serve_config.yaml`,
- `--server-option name=value` of `evals.gsm8k`,
- `--set name=value` of `deployments.collect`.

Unknown options and bad values are rejected by name, all of them in one message. A model that is loaded while the
server runs has [settings of its own](models.md#load-and-unload-models); all other options apply to it, too.
`$VITRINE_HOME` is `~/.vitrine` unless it is set.

| option | takes | default | |
|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    meanings = _meanings()
    rows = [
        f"| `{name}` | {_takes(field)} | {_default(field)} | {meanings[name]} |"
        for name, field in Options.model_fields.items()
    ]
    return HEAD + "\n".join(rows) + "\n"


def _meanings() -> dict[str, str]:
    """Each option's part of the docstring, on one line."""
    text = inspect.getdoc(Options) or ""
    parts = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", text.partition("Attributes:\n")[2], re.MULTILINE)
    return {name: " ".join(meaning.split()).replace("|", "\\|") for name, meaning in parts}


def _takes(field: FieldInfo) -> str:
    kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)] or [field.annotation]
    if get_origin(field.annotation) is Literal:
        return ", ".join(f"`{value}`" for value in kinds)
    if get_origin(field.annotation) is tuple:
        return "names, separated by commas" if kinds[0] is str else "a list, in a file"
    if kinds == [float, str]:
        return "a number, or a size"
    words: dict[Any, str] = {bool: "`true`, `false`", int: "a whole number", float: "a number", str: "a text"}
    words[dict[str, Any]] = "an object"
    return words.get(kinds[0], "a text") + (" or an object, in a file" if len(kinds) > 1 else "")


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    text = f"`{value}`".replace(str(home()), "$VITRINE_HOME")
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if isinstance(value, int) and value >= size:
            return f"{text}, {value / size:g} {unit}"
    return text


if __name__ == "__main__":
    print(page(), end="")
