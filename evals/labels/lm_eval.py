"""Labels of stored runs from lm_eval's logged samples, joined by the hash of what was asked.

lm_eval names no runs. A run stores `messages_hash`, the SHA-256 of `json.dumps(messages, sort_keys=True)`, each message
with its role and its text as `content`; for `/v1/completions` of `json.dumps([prompt])`. A line of `samples_*.jsonl`
has the same messages or prompt under `arguments`.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from evals.config import EvalError
from evals.labels.table import SPAN, tabled

if TYPE_CHECKING:
    from deployments.activations.facts import RunInfo

COLUMNS = {
    **dict.fromkeys(("run_id", "session_id", "sample_id", "problem", "argument"), pa.string()),
    **{"span.prompt_last": SPAN, "span.end": SPAN},
}
NO_FILTER = "none"


def labelled(path: str | Path, session: str, store: str | Path, model: str | None = None) -> pa.Table:
    """A row for each stored run of a session that a sample of lm_eval asked for.

    Prompts of several documents, and prompts of which the session has several runs, have no row.

    Columns are `run_id`, `session_id`, `sample_id` (`doc_id`), `problem` (`doc_hash`, one group), `argument` (which of
    the sample's requests, as the choices of a multiple choice), `span.prompt_last`, `span.end`, and each metric as
    lm_eval names it: `acc`, or with its filter `exact_match,strict-match`.

    Args:
        path: a `samples_*.jsonl` of `lm_eval --log_samples`.
        session: the session of the runs.
        store: the store's directory.
        model: the model of the runs; None where they are of one.

    Returns:
        The table. Its schema's metadata has under `labels`, as JSON, the names of the labels and what was left out.

    Raises:
        EvalError: the file or the session cannot be read, its samples' runs are of several models, or no run
            belongs to a sample.
    """
    from deployments.activations.reader.sources import segments
    from deployments.activations.segments.segments import whole_runs  # here: torch comes with it

    try:
        labels, ambiguous = _asked(Path(path))
        stored = (run.facts for file in segments(store, session) for run in whole_runs(file))
        runs = sorted((run for run in stored if model in (None, run.model)), key=lambda run: run.created)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise EvalError(f"--lm-eval {path}: {error}") from error
    known = defaultdict[str, list["RunInfo"]](list)
    for run in runs:
        if run.messages_hash in labels:
            known[run.messages_hash].append(run)
    if len(models := sorted({run.model for of in known.values() for run in of})) > 1:
        raise EvalError(f"--lm-eval {path}: its runs are of several models: choose {' or '.join(models)} with --model")
    rows = [
        {
            "run_id": run.run_id,
            "session_id": session,
            "span.prompt_last": (run.prompt_tokens - 1, run.prompt_tokens),
            "span.end": (run.tokens - 1, run.tokens),
            **labels[key],
        }
        for key, (run, *others) in known.items()
        if not others
    ]
    belonging = sum(map(len, known.values()))
    if not rows:
        of = f" of {model}" if model else ""
        why = f"; {belonging} share their prompts with others" if belonging else ""
        raise EvalError(
            f"--lm-eval {path}: none of the {len(runs)} runs{of} in session {session} belongs to its samples{why}"
        )
    left = {
        "prompts without a stored run": len(labels) - len(known),
        "prompts of several documents": ambiguous,
        "runs of no sample": len(runs) - belonging,
        "runs that share their prompts": belonging - len(rows),
    }
    return tabled(rows, COLUMNS, left)


def messages_hash(asked: Any) -> str:
    """What a stored run has as `messages_hash`.

    Args:
        asked: the messages of a chat, or a list with only the run's prompt.
    """
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _asked(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """The labels of each prompt by its hash, and how many prompts are of several documents."""
    labels, documents = defaultdict[str, dict[str, Any]](dict), defaultdict[str, set[str]](set)
    with path.open(encoding="utf-8") as lines:
        for sample in map(json.loads, lines):
            its = {"sample_id": str(sample["doc_id"]), "problem": sample["doc_hash"]}
            by_filter = "" if sample.get("filter", NO_FILTER) == NO_FILTER else f",{sample['filter']}"
            scores = {f"{name}{by_filter}": sample[name] for name in sample.get("metrics", ())}
            for name, request in _requests(sample["arguments"]):
                key = messages_hash(request)
                labels[key] |= its | {"argument": name} | scores
                documents[key].add(its["sample_id"])
    single = {key: its for key, its in labels.items() if len(documents[key]) == 1}
    return single, len(labels) - len(single)


def _requests(arguments: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The requests of a sample by name: messages of a chat, or a list of the prompt alone."""
    for name, given in arguments.items():
        asked, further = given["arg_0"], given.get("arg_1")
        if isinstance(asked, list):  # a chat is a tuple of its JSON
            yield name, [{"role": message["role"], "content": message["content"]} for message in json.loads(asked[0])]
        else:  # of a loglikelihood, arg_1 is the continuation
            yield name, [asked + further if isinstance(further, str) else asked]
