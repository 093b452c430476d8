"""Stored runs from a server or from files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import numpy.typing as npt

from vitrine.points import listed
from vitrine.runs.reading import recorded
from vitrine.runs.rows import Framework, Run, in_framework, of_files
from vitrine.server import Server

Points = str | Sequence[str] | None


def load(
    source: Any,
    points: Points = None,
    *,
    run_id: str | None = None,
    server: Server | None = None,
    framework: Framework = "numpy",
) -> Run:
    """Load one stored run.

    Args:
        source: See `load_runs`.
        points: Names of recorded points, with `*` for every layer and -1 for the model's last; all by default.
        run_id: The run to load if the source has several.
        server: The server to fetch it from; None to read this machine's files.
        framework: `numpy` for float32 arrays; `torch` for tensors of the stored data types.

    Raises:
        ValueError: The source has several runs or none, recorded nothing, or names no files.
        FileNotFoundError: The file is not on this machine.
        LookupError: The server has no such run, or the run no such point.

    Examples:
        >>> answer = server.complete("Ann has 3 boxes", max_tokens=0, capture={"points": ["layers.*.output"]})
        >>> run = vitrine.load(answer["activations_meta"]["runs"][0], "layers.-1.output", framework="torch")
        >>> list(run), run["layers.5.output"].shape[1]
        (['layers.5.output'], 192)
    """
    if server is None and run_id is not None and isinstance(source, str | Path):
        runs = [run.only(points) for run in of_files(_local(str(source)), {run_id})]
    else:
        runs = [run for run in load_runs(source, points, server=server) if run_id in (None, run.run_id)]
    if not runs:
        raise ValueError(f"the source has no run {run_id or 'at all'}")
    if len(runs) > 1:
        names = ", ".join(run.run_id for run in runs[:5])
        raise ValueError(f"the source has {len(runs)} runs: give one of them as run_id, or use load_runs: {names}, ...")
    return in_framework(runs[0], framework)


def load_runs(source: Any, points: Points = None, *, server: Server | None = None) -> list[Run]:
    """Load stored runs in the order of the source; those of a session or directory in the order of requests.

    For the order of collected prompts, which are sent by length, give `acts.run_ids`.

    Args:
        source: A response (a dict, or an object of OpenAI's client), one or several of the `runs` of its
            `activations_meta`, an Arrow file of the store, or a session's directory; with `server` also a run id, a
            list of them, or a session's name.
        points: Names of recorded points, with `*` for every layer and -1 for the model's last; all by default.
        server: The server to fetch them from; None to read this machine's files.

    Raises:
        ValueError: The response recorded nothing or names no files, or a run is not stored.
        FileNotFoundError: There is no such file or directory on this machine.
        LookupError: The server has no such run or session, or a run no such point.

    Examples:
        >>> acts = server.collect(["Ann has", "Tom has"], "layers.2.output")
        >>> len(vitrine.load_runs(acts.session, server=server))
        2
    """
    if server is not None:
        return server.load_runs(source, points)
    if isinstance(source, str | Path):
        runs = sorted(of_files(_local(str(source))), key=lambda run: (run.facts["created"], run.run_id))
        return [run.only(points) for run in runs]
    runs = []
    for entry in recorded(source):
        if not entry["points"]:
            raise ValueError(f"the answer names no files, only the run {entry['run_id']!r}: give server=")
        file = _local(next(iter(entry["points"].values()))["uri"])
        runs += [run.only(points) for run in of_files(file, {entry["run_id"]})]
    return runs


def load_stack(
    source: Server | str | Path,
    run_ids: Sequence[str],
    points: Points = None,
    *,
    tokens: str | int | Mapping[str, Any] | None = None,
) -> npt.NDArray[np.float32]:
    """Load one activation vector of each of several runs as an array.

    Args:
        source: The server that has the runs, or a session's directory.
        run_ids: The runs in the desired order.
        points: Names of recorded points, with `*` for every layer and -1 for the model's last; all by default.
        tokens: The token: `prompt_last`, `generated_last`, `last` of both, or a position from 0 (also as
            `{"positions": [3]}`); by default the only recorded token of each run.

    Returns:
        `[runs, points, hidden]`, in the order of `run_ids` and `points`; layers ascend.

    Raises:
        ValueError: A run has not exactly one such token, or the points' shapes differ.
        LookupError: There is no such run, or a run has no such point.

    Examples:
        >>> acts = server.collect(["Ann has", "Tom has"], "layers.*.output")
        >>> stack = vitrine.load_stack(server, acts.run_ids, "layers.*.output")
        >>> bool((stack == acts.values).all())
        True
    """
    if isinstance(source, Server):
        runs = source.load_runs(list(run_ids), points)
    else:
        by_id = {run.run_id: run for run in of_files(_local(str(source)), set(run_ids))}
        if missing := [name for name in run_ids if name not in by_id]:
            raise LookupError(f"{source} has no run {', '.join(missing)}")
        runs = [by_id[name] for name in run_ids]
    rows, first = [], list[tuple[int, ...]]()
    for run in runs:
        place = _place(run, tokens)
        names = run.matching(points)
        shapes = [run[point][place].shape for point in names]
        if shapes != (first := first or shapes) or len(set(shapes)) > 1:
            raise ValueError(
                f"{run.run_id}: its rows do not fit an array with those of the first run: {listed(names)} have {shapes}"
            )
        rows.append(np.stack([run[point][place] for point in names]))
    return np.stack(rows)


def _place(run: Run, tokens: str | int | Mapping[str, Any] | None) -> int:
    """The index of the token's row in a run."""
    prompt, all_tokens = run.facts["prompt_tokens"], run.facts["tokens"]
    last = {"prompt_last": prompt - 1, "last": all_tokens - 1}
    if all_tokens > prompt:
        last["generated_last"] = all_tokens - 1
    if isinstance(tokens, Mapping) and len(places := tokens.get("positions", ())) == 1:
        tokens = int(places[0])
    if not isinstance(tokens, int | None) and tokens not in ("prompt_last", "generated_last", "last"):
        message = f"tokens: {tokens!r} is not one row of each run: give prompt_last, generated_last, last"
        raise ValueError(f"{message} or a position from 0")
    position = last.get(tokens, -1) if isinstance(tokens, str) else tokens
    places = np.flatnonzero(run.positions == position) if tokens is not None else np.arange(len(run.positions))
    if len(places) != 1:
        wanted = "say which by tokens" if tokens is None else f"tokens={tokens!r} is none of them"
        raise ValueError(f"{run.run_id} has rows of {len(run.positions)} tokens: {wanted}")
    return int(places[0])


def _local(name: str) -> Path:
    """The file or directory of a path or `file://` URI.

    Raises:
        FileNotFoundError: It does not exist.
    """
    path = Path(unquote(urlsplit(name).path) if name.startswith("file://") else name).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"there is no {name} on this machine: give server= to fetch runs from a server")
    return path
