"""Some rows of a stored run, read batch by batch, for interventions that replace other rows by them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save

from deployments.activations.facts import RunRecord
from deployments.activations.reader.loading import column_of
from deployments.activations.segments.columns import DTYPES, to_tensor
from deployments.activations.segments.schema import file_info
from deployments.activations.segments.segments import DamagedError, RunBatches, whole_runs
from deployments.errors import RequestError
from deployments.points.names import some
from deployments.points.placement import Layout, Role, Turns, is_role, placed
from deployments.points.token_choices import ROLES, Last, Positions, TokenChoice, resolve


def read_rows(path: Path, entry: RunRecord, points: Sequence[Sequence[str]], tokens: TokenChoice, most: int) -> bytes:
    """Rows of a stored run, bit for bit: a safetensors file whose tensor `i` is [tokens, ...] of the i-th point.

    Each point comes as the names that it may have been recorded by, the likeliest first, or the module's path with its
    side. RequestError names the field of `from` if there is no such point or token, or more than `most` bytes;
    FileNotFoundError if the file is gone, DamagedError if it does not hold all of the run.
    """
    run = next(whole_runs(path, entry.offset), None)
    if run is None or run.facts.run_id != entry.facts.run_id:
        raise DamagedError(f"{path}: the run {entry.facts.run_id} cannot be read there")
    types, modules = run.types, file_info(run.batches[0].schema).modules
    names = [_recorded(point, list(types), modules) for point in points]
    index = _index(run, tokens)
    if pattern := next((name for name in names if None in types[name].shape), None):
        raise RequestError(f"{pattern} is an attention pattern, whose rows fit no other place", "from.point")
    widths = (math.prod(size or 0 for size in types[name].shape) * DTYPES[types[name].dtype].itemsize for name in names)
    size = sum(widths) * len(index)
    if size > most:
        raise RequestError(f"{size} bytes of stored rows, and there is room for {most}", "from", "rows_too_large")
    return save({str(i): _rows(run, name, index) for i, name in enumerate(names)})


def _recorded(names: Sequence[str], recorded: Sequence[str], modules: Mapping[str, str]) -> str:
    """What the run calls a point that goes by several names."""
    by_name = {name: name for name in recorded}
    by_module = {modules.get(name): name for name in reversed(recorded)}
    for known in (by_name, by_module):
        for name in names:
            if name in known:
                return known[name]
    raise RequestError(
        f"the run did not record {names[0]}; it has {some(recorded)}", "from.point", "point_not_recorded"
    )


def _index(run: RunBatches, tokens: TokenChoice) -> torch.Tensor:
    """Which rows of the run, [tokens], are those of the tokens that are asked for."""
    positions = column_of(run.batches, "position")  # ascending
    if tokens == "all":
        return torch.arange(len(positions))
    wanted = torch.tensor(_named(run, tokens), dtype=positions.dtype)
    index = torch.searchsorted(positions, wanted).clamp(max=len(positions) - 1)
    missing = wanted[positions[index] != wanted].tolist()
    if missing:
        has = f"it recorded those of tokens {int(positions[0])} to {int(positions[-1])}"
        raise RequestError(f"the run has no row of its token {missing[0]}; {has}", "from.tokens")
    return index


def _named(run: RunBatches, tokens: TokenChoice) -> Sequence[int]:
    """Tokens of a run by their positions, in the order in which an intervention names them."""
    if isinstance(tokens, Positions):
        return tokens.positions
    is_of_all = tokens == "last" or isinstance(tokens, Last)
    if is_of_all and run.facts.tokens > run.facts.prompt_tokens:
        message = "the run has generated tokens: choose prompt_last (of its prompt) or generated_last (of its answer)"
        raise RequestError(message, "from.tokens", "ambiguous_tokens")
    return positions_of(run, tokens, "from.tokens")


def positions_of(run: RunBatches, tokens: TokenChoice, field: str) -> Sequence[int]:
    """Tokens of a stored run by their positions, ascending; RequestError names `field` if it has none such."""
    if is_role(tokens):
        return _spoken(run, tokens, field)
    choice = placed(tokens, Layout(lambda: _text(run, field)), field)
    return resolve(choice, run.facts.prompt_tokens, field).of(run.facts.tokens)


def _spoken(run: RunBatches, choice: Role, field: str) -> list[int]:
    """Recorded tokens by their role; RequestError if the run has no roles."""
    columns = [batch.select(["position", "role", "turn"]).to_pydict() for batch in run.batches if batch.num_rows]
    positions, roles, turns = ([value for of in columns for value in of[name]] for name in ("position", "role", "turn"))
    if None in roles:
        message = (
            f"the roles of the tokens of run {run.facts.run_id} are not known: it is older, has no messages, or its "
            "chat template does not show where they are"
        )
        raise RequestError(message, field, "unknown_roles")
    speakers = [""] * (max(turns, default=-1) + 1)
    for role, turn in zip(roles, turns, strict=True):
        if turn >= 0:
            speakers[turn] = "assistant" if ROLES[role] == "reasoning" else ROLES[role]
    return [positions[row] for row in Turns(roles, turns, speakers).chosen(choice)[0]]


def _text(run: RunBatches, field: str) -> tuple[str, Sequence[int]]:
    """The text of a run's prompt, and the characters before each of its tokens and after the last."""
    prompt, text = run.facts.prompt_tokens, run.facts.text
    ends: dict[int, int] = {}
    for batch in run.batches if text is not None else ():
        pairs = zip(batch["position"].to_pylist(), batch["text_offset"].to_pylist(), strict=True)
        ends |= {position: offset for position, offset in pairs if position <= prompt and offset is not None}
    if text is not None and run.facts.tokens == prompt:
        ends[prompt] = len(text)
    if text is None or len(ends) <= prompt:
        message = "only a run that was stored with its text and all tokens of its prompt is searched: name positions"
        raise RequestError(message, f"{field}.text")
    return text[: ends[prompt]], [ends[position] for position in range(prompt + 1)]


def _rows(run: RunBatches, name: str, index: torch.Tensor) -> torch.Tensor:
    """[tokens, ...] of a point; of large batches, no other rows are read."""
    shape, dtype = run.types[name]
    rows, start = torch.empty((len(index), *(size or 0 for size in shape)), dtype=DTYPES[dtype]), 0
    for batch in run.batches:
        here = (index >= start) & (index < start + batch.num_rows)
        if here.any():
            rows[here] = to_tensor(batch[name], dtype)[index[here] - start]
        start += batch.num_rows
    return rows
