"""Activations of many prompts, as arrays."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vitrine.connection.transport import pause_s, plain
from vitrine.experiments.directions import Activations
from vitrine.experiments.generating import GenerateMethods, gathered
from vitrine.experiments.prompt_batches import Prompt, asked, check, is_chat, named_by, requests, route
from vitrine.points import canonical
from vitrine.runs.fetching import COLLECTED, collected, listed
from vitrine.runs.reading import LoadMethods
from vitrine.runs.rows import Run
from vitrine.server_error import ServerAway, ServerError

SEQUENCES = ("all", "prompt", "generated")  # for these, rows are lists even if each prompt has one row
ATTEMPTS = 16  # of a request whose answer is lost, in some five minutes
MOST_SPECIAL = 64  # characters of special tokens before a prompt

Tokens = str | Mapping[str, Any]


class CollectMethods(GenerateMethods, LoadMethods):
    """The part of `Server` that records activations."""

    async def collect(
        self,
        prompts: Sequence[Prompt],
        points: str | Sequence[str],
        *,
        tokens: Tokens = "prompt_last",
        labels: Sequence[Any] | None = None,
        tags: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
        session: str | None = None,
        max_tokens: int = 0,
        progress: bool | None = None,
        store_text: bool = True,
    ) -> Activations:
        """Record the activations of a list of prompts, in the list's order; they are also stored.

        Texts are sorted by length and sent in batches, so that texts of similar length share forward passes. In a named
        session, prompts are loaded instead if an earlier call stored them with the same arguments and position.

        Args:
            prompts: Texts, or chats (lists of messages).
            points: Names of points, the server's or TransformerLens'; `*` is every layer, -1 the last.
            tokens: The tokens to record, as in docs/concepts.md; by default the prompt's last token.
            labels: One label for each prompt; each run is stored with its label as the tag `label`.
            tags: Tags to store with each run; a list has the tags of each prompt.
            session: The session of the runs; a new one, `collect-...`, by default.
            max_tokens: How many tokens to generate after each prompt, greedily.
            progress: Whether to show a progress bar; by default in terminals and notebooks, for several requests.
            store_text: Whether to store prompt and completion with each run.

        Returns:
            The activations: one array if one token of each prompt was recorded, otherwise a list of arrays.

        Raises:
            ServerError: The server rejects the request, or cannot store a run.
            ConnectionError: The server does not respond.
            ValueError: Prompts, labels or tags are not lists of one length, or the points have different shapes.

        Examples:
            >>> acts = server.collect(["Ann has 3 boxes", "Tom ran"], "layers.*.output", labels=[True, False])
            >>> acts.values.shape, acts.layers, acts.labels
            ((2, 6, 192), [0, 1, 2, 3, 4, 5], array([ True, False]))
            >>> acts = server.collect(["Ann has 3 boxes", "Tom ran"], "layers.2.mlp.output", tokens="all")
            >>> [rows.shape[1:] for rows in acts.values]
            [(1, 192), (1, 192)]
        """
        check(prompts, "prompts")
        prompts = list(prompts)
        known = None if labels is None else np.asarray(labels)
        named = _tags(len(prompts), known, tags)
        points = [points] if isinstance(points, str) else list(points)
        capture = {"points": points, "tokens": tokens, "required": True, "store_text": store_text, "return": "id"}
        fields = {"model": self.model, "max_tokens": max_tokens, "temperature": 0}
        same = [fields, capture | {"points": [*map(canonical, points)]}]
        names = [_name([*same, place, prompts[place], own]) for place, own in enumerate(named)]
        query = {"session": session}
        stored = {run["tags"].get(COLLECTED): run["run_id"] async for run in listed(self, query)} if session else {}
        session = fields["session_id"] = session or new_session("collect")

        async def send(group: list[int]) -> dict[int, str]:
            own: dict[str, Any] = {"tags": [named[place] | {COLLECTED: names[place]} for place in group]}
            own["sample_id"] = [*map(str, group)]
            if is_chat(prompts[group[0]]):
                own = {name: value[0] for name, value in own.items()}
            path, prompt = route(asked(prompts, group))
            with named_by(group):
                answer = await self.post(path, fields | prompt | {"capture": capture | own}, len(group), repeat=False)
            return {group[run["index"]]: run["run_id"] for run in answer["activations_meta"]["runs"]}

        async def part(group: list[int]) -> dict[int, _Rows]:
            ids = {place: stored[names[place]] for place in group if names[place] in stored}
            attempt = 0
            while left := [place for place in group if place not in ids]:
                try:
                    ids |= await send(left)
                except (ServerAway, ServerError) as error:
                    attempt += 1
                    if attempt == ATTEMPTS or (isinstance(error, ServerError) and error.status != 503):
                        raise
                    await asyncio.sleep(pause_s(attempt))
                    found = await collected(self, session, [names[place] for place in left])
                    ids |= {place: found[names[place]] for place in left if names[place] in found}
            runs = await self.load_runs([ids[place] for place in group], points)
            return dict(zip(group, await asyncio.to_thread(lambda: [*map(_rows, runs)]), strict=True))

        parts = await gathered([(len(group), part(group)) for group in requests(prompts)], progress=progress)
        by_place = {place: rows for part in parts for place, rows in part.items()}
        rows = [by_place[place] for place in range(len(prompts))]
        return _activations(rows, tokens not in SEQUENCES, session, prompts, known, named)

    async def activations(self, session: str, points: str | Sequence[str] | None = None) -> Activations:
        """Load a session as `collect` returned it.

        Args:
            session: The session's name. Its runs are sorted by sample id if all ids are numbers, as those of `collect`.
            points: Names of recorded points, as in `collect`; all by default, in the order of execution.

        Returns:
            The activations. `texts` are the prompts; of chats, and with generated tokens, the whole stored text; None
            without `store_text`. Labels are the tags `label`, as JSON if all of them are.

        Raises:
            LookupError: There is no such session, or a run has no such point.
            ValueError: The runs have different points, or the points different shapes.

        Examples:
            >>> acts = server.collect(["Ann has", "Tom has"], "layers.2.output", labels=[1, 0], session="two")
            >>> again = server.activations("two")
            >>> bool((again.values == acts.values).all()), again.texts, again.labels
            (True, ['Ann has', 'Tom has'], array([1, 0]))
        """
        runs = await self.load_runs(session, points)
        if all((run.facts["sample_id"] or "").isdecimal() for run in runs):
            runs.sort(key=lambda run: int(run.facts["sample_id"]))
        rows = await asyncio.to_thread(lambda: [*map(_rows, runs)])
        if different := {*map(tuple, (of_one.points for of_one in rows))} - {tuple(rows[0].points)}:
            raise ValueError(f"points: runs of {session} have {rows[0].points}, others {[*different.pop()]}: name some")
        tags = [{name: tag for name, tag in run.facts["tags"].items() if name != COLLECTED} for run in runs]
        labels = [of_one["label"] for of_one in tags if "label" in of_one]
        with contextlib.suppress(ValueError):
            labels = [json.loads(label) for label in labels]
        known = np.asarray(labels) if len(labels) == len(tags) else None
        return _activations(rows, True, session, [_prompt(run.facts) for run in runs], known, tags)


class _Rows(NamedTuple):
    """A run's rows, `[tokens, points, hidden]`."""

    run_id: str
    points: list[str]
    values: npt.NDArray[np.float32]


def _rows(run: Run) -> _Rows:
    columns = dict(run)
    shapes = {point: rows.shape[1:] if isinstance(rows, np.ndarray) else None for point, rows in columns.items()}
    if len(set(shapes.values())) > 1 or None in shapes.values():
        if None in shapes.values():
            raise ValueError("points: attention patterns grow with the tokens and fit no array: use server.attention")
        by_shape = {shape: point for point, shape in shapes.items()}  # one point of each shape
        different = ", ".join(f"{shape} at {point}" for shape, point in by_shape.items())
        raise ValueError(f"points: rows have different shapes, {different}: collect them separately, or use load")
    return _Rows(run.run_id, list(columns), np.stack(list(columns.values()), axis=1))


def _activations(rows: Sequence[_Rows], is_one: bool, *facts: Any) -> Activations:
    """The activations of some runs; `facts` are the session, the prompts, their labels and their tags."""
    values: Any = [of_one.values for of_one in rows]
    if is_one and all(len(of_one) == 1 for of_one in values):
        values = np.concatenate(values)
    return Activations(values, rows[0].points, [of_one.run_id for of_one in rows], *facts)


def new_session(kind: str) -> str:
    """A new session's name, which begins with what is stored in it."""
    return f"{kind}-{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(3)}"


def _name(recorded: Any) -> str:
    """A name of what is recorded of a prompt, equal if all of it is."""
    return hashlib.sha256(json.dumps(recorded, sort_keys=True, default=plain).encode()).hexdigest()[:32]


def _prompt(facts: Mapping[str, Any]) -> str | None:
    """A run's prompt without the special tokens before it, if its hash confirms that; else the stored text."""
    text: str | None = facts["text"]
    ends = [text[first:] for first in range(min(MOST_SPECIAL, len(text)))] if text else []
    hashes = (hashlib.sha256(json.dumps([end]).encode()).hexdigest() for end in ends)
    return next((end for end, own in zip(ends, hashes, strict=True) if own == facts["messages_hash"]), text)


def _tags(count: int, labels: npt.NDArray[Any] | None, tags: Any) -> list[dict[str, str]]:
    """The tags of each prompt, including its label.

    Raises:
        ValueError: A list does not have the length of the prompts.
    """
    if labels is not None and labels.shape != (count,):
        raise ValueError(f"labels: there are {len(labels)} for {count} prompts")
    of_each = [tags or {}] * count if tags is None or isinstance(tags, Mapping) else tags
    if len(of_each) != count:
        raise ValueError(f"tags: there are {len(of_each)} for {count} prompts")
    if any(COLLECTED in own for own in of_each):
        raise ValueError(f"tags: {COLLECTED!r} is a tag of the client's own: choose another name")
    labelled = [dict(own) for own in of_each]
    for place, label in enumerate([] if labels is None else labels.tolist()):
        labelled[place]["label"] = label if isinstance(label, str) else json.dumps(label, default=str)
    return labelled
