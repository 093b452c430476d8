"""Names of capture points as text, for client and server; docs/concepts.md lists them."""

from __future__ import annotations

import re
from collections.abc import Collection

ROLES = ("system", "user", "assistant", "tool", "template", "reasoning")  # of tokens, by their numbers in files
# TransformerLens' name of a place in a layer -> the server's, as in deployments/points/names.py.
TRANSFORMER_LENS = {
    "resid_pre": "input",
    "resid_mid": "resid_mid",
    "resid_post": "output",
    "attn_out": "attention.output",
    "mlp_out": "mlp.output",
    "z": "attention.heads",
    "pattern": "attention.weights",
}
_HOOK = re.compile(rf"(?:(?:blocks|layers)\.(\*|-?\d+)\.)?(?:attn\.)?(?:hook_)?({'|'.join(TRANSFORMER_LENS)})")


def canonical(name: str) -> str:
    """The server's name of a point; other names than TransformerLens' are unchanged.

    `blocks.3.hook_resid_post` is `layers.3.output`; `resid_post` without a layer means every layer.
    """
    spelled = re.sub(r"\[(-?\d+|\*)\]", r".\1", name)
    if match := _HOOK.fullmatch(spelled):
        return f"layers.{match[1] or '*'}.{TRANSFORMER_LENS[match[2]]}"
    return "embed.output" if spelled in ("hook_embed", "embed") else spelled


def layer_of(point: str) -> int | None:
    """The number of a point's layer; None outside the layers, as for `embed.output`."""
    match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", point)
    return int(match[1]) if match else None


def matching(pattern: str, names: Collection[str], layers: int | None = None) -> list[str]:
    """The names that match a name or pattern, in their order.

    Args:
        pattern: A name; `*` matches one part, and a negative layer counts from the model's last.
        names: The existing names.
        layers: The model's number of layers; None if unknown.

    Raises:
        ValueError: The pattern has a negative layer, and `layers` is unknown.
    """
    if pattern in names:
        return [pattern]
    name = canonical(pattern)
    if match := re.fullmatch(r"(.*\.)(-\d+)(\..*)", name):
        if layers is None:
            raise ValueError(f"{pattern}: these files do not record the number of layers: count the layer from 0")
        name = f"{match[1]}{int(match[2]) + layers}{match[3]}"
    name += ".*" if name.endswith(".mlp.experts") else ""  # ids and weights
    fits = re.compile("[^.]+".join(map(re.escape, name.split("*"))))
    return [point for point in names if fits.fullmatch(point)]


def listed(names: Collection[str], most: int = 4) -> str:
    """The first names as text for a message, and how many there are."""
    some = ", ".join(list(names)[:most])
    return f"{some}, ... ({len(names)} in all)" if len(names) > most else some
