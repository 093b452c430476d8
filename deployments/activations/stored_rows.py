"""Some rows of a stored run, read batch by batch: what an intervention puts in the place of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from safetensors.torch import save
from torch.utils.dlpack import from_dlpack

from deployments.activations.entries import Entry
from deployments.activations.facts import RunFacts
from deployments.activations.interventions import Positions, TokenChoice
from deployments.activations.objects import AnyFile
from deployments.activations.reader import WholeRun, whole_run
from deployments.activations.schema import point_types, shard_facts, to_tensor
from deployments.activations.spec import Last
from deployments.errors import RequestError

MOST_NAMED = 20  # points of a run that a refusal lists


def read_rows(
    file: AnyFile, entry: Entry, points: Sequence[Sequence[str]], tokens: TokenChoice, most: int
) -> bytes | None:
    """Rows of a stored run, bit for bit.

    Args:
        file: Where the run is.
        entry: What the catalogue says of the run.
        points: Each by the names that it may have been recorded by, the likeliest first; a name may also be the
            module's path with its side, as the file says it.
        tokens: Which of the run's tokens, in their order; `all` are those that it recorded.
        most: The most bytes.

    Returns:
        A safetensors file, whose tensor `i` is [tokens, ...] of the i-th point; None where the run is gone.

    Raises:
        RequestError: The run has no such point or token, or there are more bytes; names the field of `from`.
        OSError: The disk refuses.
    """
    try:
        run = whole_run(file, entry.facts.run_id, entry.offset)
    except FileNotFoundError:
        run = None  # deleted since it was looked up
    if run is None:
        return None
    schema = run.batches[0].schema
    types = point_types(schema)
    names = [_recorded(point, list(types), shard_facts(schema).modules) for point in points]
    index = _index(run, tokens)
    if pattern := next((name for name in names if None in types[name].shape), None):
        raise RequestError(f"{pattern} is an attention pattern, whose rows fit no other place", "from.point")
    size = sum(to_tensor(run.batches[0][name], types[name].dtype)[0].nbytes for name in names) * len(index)
    if size > most:
        raise RequestError(f"{size} bytes of stored rows, and there is room for {most}", "from", "rows_too_large")
    return save({str(i): _rows(run, name, types[name].dtype, index) for i, name in enumerate(names)})


def _recorded(names: Sequence[str], recorded: Sequence[str], modules: Mapping[str, str]) -> str:
    """What the run calls a point that goes by several names."""
    by_module = {modules.get(name): name for name in reversed(recorded)}
    found = next((name for name in names if name in recorded), None)
    found = found or next((by_module[name] for name in names if name in by_module), None)
    if found is None:
        more = ", ..." if len(recorded) > MOST_NAMED else ""
        there_are = ", ".join(recorded[:MOST_NAMED]) + more
        raise RequestError(f"the run did not record {names[0]}; it has {there_are}", "from.point", "point_not_recorded")
    return found


def _index(run: WholeRun, tokens: TokenChoice) -> torch.Tensor:
    """Which rows of the run, [tokens], are those of the tokens that are asked for."""
    positions = torch.cat([from_dlpack(batch["position"]) for batch in run.batches])  # ascending
    if tokens == "all":
        return torch.arange(len(positions))
    wanted = torch.tensor(_positions(run.facts, tokens), dtype=positions.dtype)
    index = torch.searchsorted(positions, wanted).clamp(max=len(positions) - 1)
    missing = wanted[positions[index] != wanted].tolist()
    if missing:
        has = f"it recorded those of tokens {int(positions[0])} to {int(positions[-1])}"
        raise RequestError(f"the run has no row of its token {missing[0]}; {has}", "from.tokens")
    return index


def _positions(run: RunFacts, tokens: TokenChoice) -> Sequence[int]:
    """Tokens of a run by their positions, in the words of an intervention."""
    prompt = run.prompt_tokens
    if isinstance(tokens, Positions):
        return tokens.positions
    if isinstance(tokens, Last):
        if tokens.last > prompt:
            raise RequestError(f"the run's prompt has {prompt} tokens", "from.tokens")
        return range(prompt - tokens.last, prompt)
    return {"prompt": range(prompt), "generated": range(prompt, run.tokens), "last": [prompt - 1]}[tokens]


def _rows(run: WholeRun, name: str, dtype: str, index: torch.Tensor) -> torch.Tensor:
    """[tokens, ...] of a point; no more than those is copied out of the file."""
    first = to_tensor(run.batches[0][name], dtype)
    rows, start = first.new_empty(len(index), *first.shape[1:]), 0
    for batch in run.batches:
        here = (index >= start) & (index < start + batch.num_rows)
        rows[here] = to_tensor(batch[name], dtype)[index[here] - start]
        start += batch.num_rows
    return rows
