"""Labels of stored runs from lm_eval's logged samples, joined by the hash of what was asked.

lm_eval names no runs. A run stores `messages_hash`, the SHA-256 of `json.dumps(messages, sort_keys=True)`, each message
with its role and its text as `content`; for `/v1/completions` of `json.dumps([prompt])`. A line of `samples_*.jsonl`
has the same messages or prompt under `arguments`. Several runs of one prompt, as of a second evaluation in the session,
are told apart by what they answered, `resps` of the line, which needs their stored text.
"""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from evals.config import EvalError
from evals.labels.inspect_log import tabled
from evals.labels.table import SPAN

if TYPE_CHECKING:
    from deployments.activations.facts import RunFacts

COLUMNS = {
    **dict.fromkeys(("run_id", "session_id", "sample_id", "problem", "argument"), pa.string()),
    **{"span.prompt_last": SPAN, "span.end": SPAN},
}
NO_FILTER = "none"
SPECIAL = re.compile(r"<[^<>\s]+>")  # a token as `<|im_end|>` or `</s>`


@dataclass
class _Asked:
    """What the lines say of one prompt."""

    labels: dict[str, Any] = field(default_factory=dict)
    documents: set[str] = field(default_factory=set)
    answers: set[str] = field(default_factory=set)  # none of a loglikelihood
    stops: set[str] = field(default_factory=set)  # strings that end an answer and are no part of it

    def gave(self, text: str) -> bool:
        """Whether a run's text ends in one of the answers, and in what stopped it."""
        return any(answer and answer in text and self._is_end(answer, text) for answer in self.answers)

    def _is_end(self, answer: str, text: str) -> bool:
        rest = SPECIAL.sub("", text.rpartition(answer)[2]).strip()
        return not rest or rest in {stop.strip() for stop in self.stops}


def labelled(path: str | Path, session: str, store: str | Path, model: str | None = None) -> pa.Table:
    """A row for each stored run of a session that a sample of lm_eval asked for.

    Of several runs with one prompt, the one that gave the sample's answer has a row, if it is the only one whose stored
    text ends in that answer.

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
        asked, ambiguous = _asked(Path(path))
        stored = (run.facts for file in segments(store, session) for run in whole_runs(file))
        there = sorted((run for run in stored if model in (None, run.model)), key=lambda run: run.created)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise EvalError(f"--lm-eval {path}: {error}") from error
    known = defaultdict[str, list["RunFacts"]](list)
    for run in there:
        if run.messages_hash in asked:
            known[run.messages_hash].append(run)
    if len(models := sorted({run.model for of in known.values() for run in of})) > 1:
        raise EvalError(f"--lm-eval {path}: its runs are of several models: choose {' or '.join(models)} with --model")
    rows = [
        {
            "run_id": run.run_id,
            "session_id": session,
            "span.prompt_last": (run.prompt_tokens - 1, run.prompt_tokens),
            "span.end": (run.tokens - 1, run.tokens),
            **asked[key].labels,
        }
        for key, of in known.items()
        for run in _own(of, asked[key])
    ]
    belonging = sum(map(len, known.values()))
    if not rows:
        of = f" of {model}" if model else ""
        why = f"; {belonging} share their prompts with others, and no text tells them apart" if belonging else ""
        raise EvalError(
            f"--lm-eval {path}: none of the {len(there)} runs{of} in session {session} belongs to its samples{why}"
        )
    left = {
        "prompts without a stored run": len(asked) - len(known),
        "prompts of several documents": ambiguous,
        "runs of no sample": len(there) - belonging,
        "further runs of a prompt": belonging - len(rows),
    }
    return tabled(rows, COLUMNS, left)


def _own(of: "Sequence[RunFacts]", asked: _Asked) -> "Sequence[RunFacts]":
    """Of the runs of one prompt the sample's own, if it is known."""
    if len(of) == 1:
        return of
    found = [run for run in of if asked.gave(run.text or "")]
    return found if len(found) == 1 else ()


def messages_hash(asked: Any) -> str:
    """What a stored run has as `messages_hash`.

    Args:
        asked: the messages of a chat, or a list with only the run's prompt.
    """
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _asked(path: Path) -> tuple[dict[str, _Asked], int]:
    """What the lines say of each prompt by its hash, and how many prompts are of several documents."""
    found = defaultdict[str, _Asked](_Asked)
    with path.open(encoding="utf-8") as lines:
        for sample in map(json.loads, lines):
            its = {"sample_id": str(sample["doc_id"]), "problem": sample["doc_hash"]}
            by_filter = "" if sample.get("filter", NO_FILTER) == NO_FILTER else f",{sample['filter']}"
            scores = {f"{name}{by_filter}": sample[name] for name in sample.get("metrics", ())}
            requests = _requests(sample["arguments"])
            for (name, said, stops), answers in zip(requests, sample["resps"], strict=True):
                one = found[messages_hash(said)]
                one.labels |= its | {"argument": name} | scores
                one.documents.add(its["sample_id"])
                one.answers |= {answer for answer in answers if isinstance(answer, str)}
                one.stops |= stops
    single = {key: one for key, one in found.items() if len(one.documents) == 1}
    return single, len(found) - len(single)


def _requests(arguments: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Any, set[str]]]:
    """The requests of a sample by name: messages of a chat, or a list of the prompt alone; and their stop strings."""
    for name, given in arguments.items():
        asked, further = given["arg_0"], given.get("arg_1")
        until = further.get("until") or () if isinstance(further, dict) else ()
        stops = {until} if isinstance(until, str) else set(until)
        if isinstance(asked, list):  # a chat is a tuple of its JSON
            yield name, [{"role": said["role"], "content": said["content"]} for said in json.loads(asked[0])], stops
        else:  # of a loglikelihood, arg_1 is the continuation
            yield name, [asked + further if isinstance(further, str) else asked], stops
