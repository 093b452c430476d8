"""Activations of many prompts, as arrays."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vitrine.experiments.directions import Activations
from vitrine.experiments.generating import GenerateMethods, gathered
from vitrine.experiments.prompt_batches import Prompt, asked, check, is_chat, named_by, requests
from vitrine.runs.reading import LoadMethods
from vitrine.runs.rows import Run

SEQUENCES = ("all", "prompt", "generated")  # for these, rows are lists even if each prompt has one row

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

        Texts are sorted by length and sent in batches, so that texts of similar length share forward passes.

        Args:
            prompts: Texts, or chats (lists of messages).
            points: Names of points, the server's or TransformerLens'; `*` is every layer, -1 the last.
            tokens: The tokens to record, as in docs/points.md; by default the prompt's last token.
            labels: One label for each prompt; each run is stored with its label as the tag `label`.
            tags: Tags to store with each run; a list has the tags of each prompt.
            session: The session of the runs; a new one by default.
            max_tokens: How many tokens to generate after each prompt, greedily.
            progress: Whether to show a progress bar; by default in terminals and notebooks, for several requests.
            store_text: Whether to store prompt and answer with each run.

        Returns:
            The activations: one array if one token of each prompt was recorded, otherwise a list of arrays.

        Raises:
            ServerError: The server rejects the request, or cannot store a run.
            ConnectionError: It does not answer.
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
        groups = requests(prompts)
        known = None if labels is None else np.asarray(labels)
        named = _tags(len(prompts), known, tags)
        session = session or f"collect-{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(3)}"
        points = [points] if isinstance(points, str) else list(points)
        capture = {"points": points, "tokens": tokens, "required": True, "store_text": store_text, "return": "id"}
        fields = {"max_tokens": max_tokens, "temperature": 0, "session_id": session}

        async def part(group: list[int]) -> dict[int, _Rows]:
            own: dict[str, Any] = {"tags": [named[place] for place in group], "sample_id": [*map(str, group)]}
            if is_chat(prompts[group[0]]):
                own = {name: value[0] for name, value in own.items()}
            with named_by(group):
                rows = await self._recorded(asked(prompts, group), fields | {"capture": capture | own})
            return {group[index]: of_one for index, of_one in rows.items()}

        parts = await gathered([(len(group), part(group)) for group in groups], progress=progress)
        by_place = {place: rows for part in parts for place, rows in part.items()}
        ordered = [by_place[place] for place in range(len(prompts))]
        values: Any = [rows.values for rows in ordered]
        if tokens not in SEQUENCES and all(len(rows) == 1 for rows in values):
            values = np.concatenate(values)
        return Activations(values, ordered[0].points, [rows.run_id for rows in ordered], session, prompts, known)

    async def _recorded(self, prompt: Any, fields: Mapping[str, Any]) -> dict[int, _Rows]:
        """Prompt index -> the recorded rows of one request."""
        meta = (await self.complete(prompt, **fields))["activations_meta"]
        indices = {run["run_id"]: run["index"] for run in meta["runs"]}
        loaded = await self.load_runs(list(indices))
        runs = await asyncio.to_thread(lambda: [_rows(run) for run in loaded])
        return {indices[rows.run_id]: rows for rows in runs}


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
    labelled = [dict(own) for own in of_each]
    for place, label in enumerate([] if labels is None else labels.tolist()):
        labelled[place]["label"] = label if isinstance(label, str) else json.dumps(label, default=str)
    return labelled
