"""Stored runs, fetched from the server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from vitrine.connection.transport import Transport, together
from vitrine.runs.fetching import COLLECTED, listed, named, run_bytes
from vitrine.runs.rows import Run, detached, of_bytes

MOST_RUNS = 64  # of a file, fetched together
FILES_AT_ONCE = 4  # of one call


class LoadMethods(Transport):
    """The part of `Server` that loads stored runs."""

    async def load_runs(self, source: Any, points: str | Sequence[str] | None = None) -> list[Run]:
        """Load stored runs in the order of `source`; those of a session in the order of requests.

        For the order of collected prompts, which are sent by length, give `acts.run_ids`.

        Args:
            source: An answer of this server (a dict, or an object of OpenAI's client), one of the `runs` of its
                `activations_meta`, a run id, a list of them, or a session's name.
            points: Names of recorded points, with `*` for every layer and -1 for the model's last; all by default.

        Raises:
            LookupError: There is no such run or session, or a run has no such point.
            ServerError: The server rejects the request.

        Examples:
            >>> acts = server.collect(["Ann has", "Tom has"], ["layers.1.output", "layers.5.output"])
            >>> [run.facts["text"] for run in server.load_runs(acts.run_ids[::-1], "layers.-1.output")]
            ['Tom has', 'Ann has']
        """
        entries = await self._entries(source)
        files: dict[tuple[str, str, str | None], list[Mapping[str, Any]]] = {}
        for entry in entries:
            files.setdefault((entry["session_id"], entry["file"], entry.get("owner")), []).append(entry)
        parts = [of[first : first + MOST_RUNS] for of in files.values() for first in range(0, len(of), MOST_RUNS)]
        room = asyncio.Semaphore(FILES_AT_ONCE)

        async def part(some: Sequence[Mapping[str, Any]]) -> list[Run]:
            async with room:
                data = b"".join([piece async for piece in run_bytes(self, some)])
            runs = of_bytes(data, {entry["run_id"] for entry in some})
            return runs if points is None else [detached(run.only(points)) for run in runs]

        by_id = {run.run_id: run for runs in await together(map(part, parts)) for run in runs}
        if missing := [entry["run_id"] for entry in entries if entry["run_id"] not in by_id]:
            raise LookupError(f"{self.url} has no run {', '.join(missing)} any more")
        return [by_id[entry["run_id"]] for entry in entries]

    async def _entries(self, source: Any) -> list[dict[str, Any]]:
        """The server's entries of the source's runs."""
        names = run_ids(source)
        entries = await named(self, names)
        if isinstance(source, str) and not entries:
            runs = [run async for run in listed(self, {"session": source})]
            # A server that still works on a request whose answer was lost stores its runs beside those of the next one.
            single = {(run.get("owner"), run["tags"].get(COLLECTED, run["run_id"])): run for run in runs}
            entries = {run["run_id"]: run for run in single.values()}
            names = list(entries) or names
        if missing := [name for name in names if name not in entries]:
            kind = "run or session" if isinstance(source, str) else "run"
            raise LookupError(f"{self.url} has no {kind} {', '.join(missing)}")
        return [entries[name] for name in names]


def run_ids(source: Any) -> list[str]:
    """The ids of the source's runs, in its order.

    Raises:
        ValueError: It recorded nothing.
    """
    if isinstance(source, str):
        return [source]
    if isinstance(source, Sequence):
        return [name for part in source for name in run_ids(part)]
    return [run["run_id"] for run in recorded(source)]


def recorded(source: Any) -> list[Mapping[str, Any]]:
    """The `runs` of an answer, or the source itself if it is one run or a list of runs.

    Raises:
        ValueError: It stored nothing; the message has the reason.
    """
    if isinstance(source, Mapping) and "run_id" in source:
        if source.get("status") == "failed":
            raise ValueError(f"run {source['run_id']!r} is not stored: {source.get('reason')}")
        return [source]
    if isinstance(source, Sequence):
        return [run for part in source for run in recorded(part)]
    meta = source.get("activations_meta") if isinstance(source, Mapping) else getattr(source, "activations_meta", None)
    if not meta or not meta.get("runs"):
        raise ValueError("the answer recorded no activations: ask with capture={'points': [...]}")
    if meta["status"] == "inline":
        raise ValueError("the answer contains its activations, because capture's return is inline: nothing is stored")
    if meta["status"] != "stored":
        raise ValueError(
            f"not all of the answer's runs are stored ({meta.get('reason')}): load those of its runs that are"
        )
    return sorted(meta["runs"], key=lambda run: run["index"])
