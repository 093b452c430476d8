"""The server's options as a table: `python -m deployments.options_table` prints it, and the documentation shows it."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from deployments.command_line import meanings
from deployments.options import Options, home

# Each group's title, by its first option.
GROUPS = {
    "model": "Model",
    "num_replicas": "Replicas",
    "batch_invariant": "Engine",
    "request_timeout_s": "Limits",
    "api_keys_file": "Access",
    "max_client_store_bytes": "Memory and storage",
    "models_dir": "Loading models",
    "allow_client_code": "Remote nnsight code",
    "monitors": "Monitors",
    "public_url": "Addresses",
}


def table() -> str:
    """All options in Markdown, one table for each group."""
    texts, lines = meanings(Options), []
    for name, field in Options.model_fields.items():
        if name in GROUPS:
            lines.append(f"\n### {GROUPS[name]}\n\n| option | type | default | meaning |\n|---|---|---|---|")
        lines.append(f"| `{name}` | {_type(field)} | {_default(field)} | {texts[name]} |")
    return "\n".join(lines).lstrip() + "\n"


def _type(field: FieldInfo) -> str:
    kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)] or [field.annotation]
    if get_origin(field.annotation) is Literal:
        return ", ".join(f"`{value}`" for value in kinds)
    if get_origin(field.annotation) is tuple:
        return "list"
    words: dict[Any, str] = {bool: "boolean", int: "integer", float: "number", str: "string", dict[str, Any]: "object"}
    return " or ".join(words[kind] for kind in kinds if kind in words)


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
    print(table(), end="")
