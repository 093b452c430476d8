"""The cells of a patch grid: places in the layers, and aligned tokens of two prompts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vitrine.experiments.prompt_batches import Prompt

Columns = list[tuple[int, int]]  # positions of the clean prompt and of the corrupt one


class Pair(NamedTuple):
    """The clean prompt and the corrupt one, the ids and texts of their tokens, the targets' ids, and what aligns."""

    prompts: tuple[Prompt, Prompt]
    ids: list[list[int]]
    tokens: list[list[str]]
    targets: list[int]
    columns: Columns


class Row(NamedTuple):
    """A patched place; `head` is None for all of its heads, or where there are none."""

    name: str
    layer: int
    point: str
    module: str
    order: int  # in a forward pass
    head: int | None = None

    def patch(self, run_id: str, source: int, position: int) -> list[dict[str, Any]]:
        """The interventions that replace this place at a position by a run's at position `source`."""
        kept = {"run_id": run_id, "tokens": {"positions": [source]}}
        part = {} if self.head is None else {"heads": [self.head]}
        return [{"op": "replace", "point": self.point, "tokens": {"positions": [position]}, "from": kept, **part}]


def aligned(ids: Sequence[Sequence[int]], tokens: Sequence[Sequence[str]]) -> Columns:
    """The aligned positions of two prompts, as `patch_grid` says.

    Raises:
        ValueError: Several longest common subsequences exist.
    """
    clean, corrupt = ids
    if len(clean) == len(corrupt):
        return [(place, place) for place in range(len(clean))]
    equal = np.equal.outer(clean, corrupt)
    longest = np.zeros((len(clean) + 1, len(corrupt) + 1), int)  # common subsequence of the ends from (i, j) on
    for i, j in product(reversed(range(len(clean))), reversed(range(len(corrupt)))):
        longest[i, j] = longest[i + 1, j + 1] + 1 if equal[i, j] else max(longest[i + 1, j], longest[i, j + 1])
    common = _latest(longest, equal)
    # It is the only one if the latest in the clean prompt is also the latest in the corrupt one.
    if common != [(i, j) for j, i in _latest(longest.T, equal.T)]:
        message = "the prompts' common tokens align in several ways: reword one, or give align=[(clean, corrupt), ...]"
        raise ValueError(f"{message}\n  clean:   {tokens[0]}\n  corrupt: {tokens[1]}")
    columns: Columns = []
    for (first, second), (end, stop) in pairwise([(-1, -1), *common, (len(clean), len(corrupt))]):
        columns += [*_matched(range(first + 1, end), range(second + 1, stop)), (end, stop)]
    return columns[:-1]


def _latest(longest: npt.NDArray[Any], equal: npt.NDArray[Any]) -> Columns:
    """The common subsequence that is the latest in the first prompt, but as early as possible in the second one."""
    common, i, j = Columns(), 0, 0
    while longest[i, j]:
        if longest[i + 1, j] == longest[i, j]:
            i += 1
        elif equal[i, j]:
            common.append((i, j))
            i, j = i + 1, j + 1
        else:
            j += 1
    return common


def _matched(own: Sequence[int], other: Sequence[int]) -> Columns:
    """Align two stretches of tokens: one to one if they have the same length, else by their last tokens alone."""
    pairs = list(zip(own, other, strict=False))
    return pairs if len(own) == len(other) or not pairs else [(own[-1], other[-1])]


def chosen(name: str, wanted: Sequence[int] | None, existing: Sequence[int], count: int) -> list[int]:
    """Resolve layers or positions, by default all; -1 is `count - 1`.

    Raises:
        IndexError: One does not exist; the message starts with `name`.
    """
    if wanted is None:
        return list(existing)
    places = [int(number) + (count if number < 0 else 0) for number in wanted]
    if missing := [int(number) for number, place in zip(wanted, places, strict=True) if place not in existing]:
        raise IndexError(f"{name}: {missing} are not among {[*existing]}")
    return places
