"""Labels of stored runs from lm_eval's logged samples, joined by the hash of what was asked.

lm_eval names no runs. A run stores `messages_hash`, the SHA-256 of `json.dumps(messages, sort_keys=True)`, each message
with its role and its text as `content`; for `/v1/completions` of `json.dumps([prompt])`. A line of `samples_*.jsonl`
has the same messages or prompt under `arguments`.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from evals.config import EvalError
from evals.labels.inspect_log import tabled
from evals.labels.table import SPAN

COLUMNS = {
    **dict.fromkeys(("run_id", "session_id", "sample_id", "problem", "argument"), pa.string()),
    **{"span.prompt_last": SPAN, "span.end": SPAN},
}
NO_FILTER = "none"


def labelled(path: str | Path, session: str, store: str | Path) -> pa.Table:
    """A row for each stored run of a session that a sample of lm_eval asked for.

    Columns are `run_id`, `session_id`, `sample_id` (`doc_id`), `problem` (`doc_hash`, one group), `argument` (which of
    the sample's requests, as the choices of a multiple choice), `span.prompt_last`, `span.end`, and each metric as
    lm_eval names it: `acc`, or with its filter `exact_match,strict-match`.

    Args:
        path: a `samples_*.jsonl` of `lm_eval --log_samples`.
        session: the session of the runs.
        store: the store's directory.

    Returns:
        The table. Its schema's metadata has under `labels`, as JSON, the names of the labels and what was left out.

    Raises:
        EvalError: the file or the session cannot be read, or no run is of its samples.
    """
    from deployments.activations import runs  # here: torch comes with it

    try:
        asked, ambiguous = _asked(Path(path))
        there = runs(Path(store) / session)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise EvalError(f"--lm-eval {path}: {error}") from error
    known = [(run, asked[run.messages_hash]) for run in there if run.messages_hash in asked]
    if not known:
        raise EvalError(f"--lm-eval {path}: none of the {len(there)} runs of session {session} belongs to its samples")
    rows = [
        {
            "run_id": run.run_id,
            "session_id": session,
            "span.prompt_last": (run.prompt_tokens - 1, run.prompt_tokens),
            "span.end": (run.tokens - 1, run.tokens),
            **labels,
        }
        for run, labels in known
    ]
    unmet = len(asked.keys() - {run.messages_hash for run in there})
    left = {
        "prompts without a stored run": unmet,
        "prompts of several documents": ambiguous,
        "runs of no sample": len(there) - len(known),
    }
    return tabled(rows, COLUMNS, left)


def messages_hash(asked: Any) -> str:
    """What a stored run has as `messages_hash`.

    Args:
        asked: the messages of a chat, or the list of prompts of a request for completions.
    """
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _asked(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """What the lines say of each prompt by its hash, and how many prompts are of several documents."""
    found: dict[str, dict[str, Any]] = {}
    documents: dict[str, set[str]] = {}
    with path.open(encoding="utf-8") as lines:
        for sample in map(json.loads, lines):
            its = {"sample_id": str(sample["doc_id"]), "problem": sample["doc_hash"]}
            by_filter = "" if sample.get("filter", NO_FILTER) == NO_FILTER else f",{sample['filter']}"
            scores = {f"{name}{by_filter}": sample[name] for name in sample.get("metrics", ())}
            for name, said in _requests(sample["arguments"]):
                key = messages_hash(said)
                documents.setdefault(key, set()).add(its["sample_id"])
                found[key] = found.get(key, {}) | its | {"argument": name} | scores
    ambiguous = {key for key, ids in documents.items() if len(ids) > 1}
    return {key: labels for key, labels in found.items() if key not in ambiguous}, len(ambiguous)


def _requests(arguments: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The requests of a sample by name: messages of a chat, or a list of the prompt alone."""
    for name, given in arguments.items():
        asked, further = given["arg_0"], given.get("arg_1")
        if isinstance(asked, list):  # a chat is a tuple of its JSON
            yield name, [{"role": said["role"], "content": said["content"]} for said in json.loads(asked[0])]
        else:  # of a loglikelihood, arg_1 is the continuation
            yield name, [asked + further if isinstance(further, str) else asked]
