"""Takes over pins, owners and profiles of earlier versions, which were files, when a store starts."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from deployments.activations.facts import names_a_session
from deployments.activations.files.disk import directory
from deployments.points.profiles import Profile, body_of

_FOLDERS = (".pins", ".owners", ".profiles")
_DEFAULTS = ".defaults.json"
_PROFILE = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]{0,63})(?:@([A-Za-z0-9_.-]+))?\.json")
_RECORD = {"owner": None, "shared": False, "limited": False, "fence": "", "claimed": 0.0}

logger = logging.getLogger(__name__)


def take_over(database: sqlite3.Connection, root: Path) -> list[str]:
    """Put into the state's database what files say and it does not know; the folders that were read."""
    folders = [name for name in _FOLDERS if (root / name).is_dir() and not (root / name).is_symlink()]
    pins, owners, profiles = (_files(root / name) if name in folders else {} for name in _FOLDERS)
    tables = {
        "pins": [(name,) for name in pins if names_a_session(name)],
        "owners": [(name, *_record(path)) for name, path in owners.items() if names_a_session(name)],
        "profiles": list(_profiles(profiles)),
    }
    for table, rows in tables.items():
        for row in rows:
            database.execute(f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * len(row))})", row)
    return folders


def put_aside(root: Path, folders: Iterable[str]) -> None:
    """Give folders that were taken over other names, under which nothing reads them; durable when this returns."""
    for name in folders:
        with contextlib.suppress(FileNotFoundError):
            (root / name).rename(root / f"{name}.taken-over-{secrets.token_hex(4)}")
    if folders:
        with directory(root) as top:
            os.fsync(top)


def _files(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.iterdir() if path.is_file() and not path.is_symlink()}


def _record(path: Path) -> tuple[Any, ...]:
    try:
        return tuple((_RECORD | json.loads(path.read_bytes()))[name] for name in _RECORD)
    except (ValueError, TypeError):
        logger.exception("%s cannot be read: admins alone may read the session", path)
        return tuple((_RECORD | {"owner": ""}).values())  # no owner has this name


def _profiles(files: dict[str, Path]) -> Iterator[tuple[Any, ...]]:
    """Rows of the table of profiles."""
    defaults: Any = {}
    if _DEFAULTS in files:
        with contextlib.suppress(ValueError):
            defaults = json.loads(files.pop(_DEFAULTS).read_bytes())
    for match, path in ((match, files[name]) for name in files if (match := _PROFILE.fullmatch(name))):
        try:
            body = body_of(path.read_bytes())
            profile = Profile.model_validate(body)
            if profile.name != match[1]:
                raise ValueError(f"it is the profile {profile.name!r} under another name")
        except ValueError:  # one bad file must not keep the others from being served
            logger.exception("profile %s cannot be read and is not listed", path)
            continue
        is_default = isinstance(defaults, dict) and defaults.get(profile.model) == path.stem
        row = profile.name, match[2] or "", profile.model, profile.description, path.stat().st_mtime
        yield *row, is_default, json.dumps(body)
