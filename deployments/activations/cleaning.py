"""What the command deletes from a store whose server does not run, and what it keeps."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deployments.activations.database import held_alone
from deployments.activations.deleting import begin_deletion, finish_deletion
from deployments.activations.owners import Owners
from deployments.activations.pins import Pins
from deployments.activations.retention import Held, oldest

_AGES = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base ** (power + 1)
    for power, prefix in enumerate("KMGT")
    for unit, base in (("iB", 1024), ("B", 1000))
}


class Planned(NamedTuple):
    """A session that is to be deleted, or kept though it was to be; and why."""

    session: Held
    goes: bool
    why: str


@contextlib.contextmanager
def alone(root: Path, route: str) -> Iterator[None]:
    """Hold a store as a server does that runs on it.

    Args:
        root: The store's directory.
        route: What a server does the same by.

    Raises:
        ValueError: A server runs on it; says the route.
        OSError: The lock cannot be had.
    """
    try:
        with held_alone(root):
            yield
    except BlockingIOError as error:
        raise ValueError(f"a server runs on {root}: it does this itself, {route}") from error


def plan(sessions: Sequence[dict[str, Any]], pins: Pins, older: float | None, most: int | None) -> list[Planned]:
    """What goes, the oldest first.

    Args:
        sessions: As the catalogue lists them.
        pins: Those that stay.
        older: Sessions whose last run was before go, in Unix seconds.
        most: After these, the oldest go until the rest has no more bytes.
    """
    held = [Held(one["id"], one["bytes"], one["updated"]) for one in sessions]
    pinned = pins.names()
    aged = [one for one in held if older is not None and one.last < older]
    others = [one for one in held if older is None or one.last >= older]
    missing = 0 if most is None else sum(one.bytes for one in held) - most
    missing -= sum(one.bytes for one in aged if one.id not in pinned)
    going = oldest([one for one in others if one.id not in pinned], missing)
    last = max((one.last for one in going), default=-math.inf)
    passed = [one for one in others if one.id in pinned and one.last <= last]
    planned = [Planned(one, one.id not in pinned, "too old") for one in aged]
    planned += [Planned(one, one.id not in pinned, "the oldest") for one in (*going, *passed)]
    return sorted(planned, key=lambda one: (one.session.last, one.session.id))


def delete(root: Path, session_id: str) -> None:
    """Delete a session's directory as the server does it, so that no half of it is ever listed, and its owner's record.

    Raises:
        OSError: The disk refuses.
    """
    if deletion := begin_deletion(root, session_id):
        Owners(root).forget(session_id)
        finish_deletion(deletion)


def seconds_of(text: str, flag: str) -> float:
    """An age, `12h` or `30d`, in seconds.

    Raises:
        ValueError: It is none; names the flag.
    """
    if not (match := re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)):
        raise ValueError(f"{flag} {text!r} must be a number and s, m, h, d or w, such as 12h or 30d")
    return float(match[1]) * _AGES[match[2]]


def bytes_of(text: str, flag: str) -> int:
    """A size, `500GiB` or `2TB`, in bytes.

    Raises:
        ValueError: It is none; names the flag.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text)
    if not match or match[2] not in _UNITS:
        raise ValueError(f"{flag} {text!r} must be bytes, or a number and KiB, MiB, GiB, TiB, KB, MB, GB or TB")
    return int(float(match[1]) * _UNITS[match[2]])
