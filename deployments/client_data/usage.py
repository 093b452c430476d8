"""Counts of what each owner has used, which a store keeps: a file `.usage/<day>.json` for each day in UTC."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deployments.accounts import Account
from deployments.activations.facts import explained
from deployments.activations.files.disk import write
from deployments.client_data.files import files_in

FOLDER = ".usage"
ZERO = {"requests": 0, "prompt_tokens": 0, "completion_tokens": 0}


class UsageFiles:
    """Counts by day and owner, "" for none. All methods raise StoreError on a disk error."""

    def __init__(self, root: Path) -> None:
        """Use a store's directory."""
        self._root = root

    def put(self, counts: Mapping[tuple[str, str], Mapping[str, int]]) -> None:
        """Add counts, by day and owner; durable when it returns. Called by one thread at a time."""
        with explained(self._root):
            for day in {day for day, _ in counts}:
                kept = _read(self._root / FOLDER / f"{day}.json")
                for owner, more in ((owner, more) for (of, owner), more in counts.items() if of == day):
                    kept[owner].update(more)
                write(self._root, FOLDER, f"{day}.json", [json.dumps(kept).encode()])

    def totals(self, period: str, account: Account) -> list[dict[str, Any]]:
        """The sums over the days that begin with `period`, of an account, or of every owner for an admin."""
        sums = defaultdict[str, Counter[str]](Counter, {account.owner or "": Counter()})
        with explained(self._root):
            for item in files_in(self._root / FOLDER):
                for owner, counts in _read(Path(item.path)).items() if item.name.startswith(period) else ():
                    if account.is_admin or owner == account.owner:
                        sums[owner].update(counts)
        return [{"owner": owner or None} | ZERO | sums[owner] for owner in sorted(sums)]


def _read(path: Path) -> defaultdict[str, Counter[str]]:
    """The counts of one day."""
    counts = json.loads(path.read_bytes()) if path.exists() else {}
    return defaultdict(Counter, {owner: Counter(of_owner) for owner, of_owner in counts.items()})
