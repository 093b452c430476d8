"""Which tokens of a stored run are the answer, the tool calls and the tool results: by its text and its offsets."""

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from evals.scoring import Rule, score
from evals.task.records import since_prompt
from evals.task.trajectory import Sample

if TYPE_CHECKING:
    from deployments.activations.segments.segments import RunBatches  # which imports torch

Span = tuple[int, int]  # the first, and the one after the last
Message = dict[str, Any]


class Characters(NamedTuple):
    """Parts of a run's text, in characters; None where it has no such part, or the template writes it in another way.

    Attributes:
        answer: The number that was scored.
        tool_calls: Calls of the last turn that made any, each from its function's name to the end of its arguments.
        tool_results: Results of the last turn that has any, without the template's words around them.
    """

    answer: Span | None
    tool_calls: Span | None
    tool_results: Span | None


def characters(text: str, prompt: str, messages: Sequence[Message], scored: tuple[str, Span] | None) -> Characters:
    """The parts of a conversation in the text of its run.

    They are looked for in their order, each after the one before it, so that a number that comes several times is
    found where it was said.

    Args:
        text: prompt and generated text, special tokens included.
        prompt: what the user asked last.
        messages: those since, the model's and the tools' results; the last is the run's answer.
        scored: the text that was scored, and where the number stands in it; None where that is no part of this run.
    """
    at = begins = _behind(_found(text, [prompt.strip()], 0), 0)
    calls, results = list[Span | None](), list[Span | None]()
    for before, message in pairwise([{"role": "user"}, *messages]):
        if message["role"] == "tool":
            results = [*(results if before["role"] == "tool" else ()), _result(text, message["content"], at)]
            at = _behind(results[-1], at)
            continue
        begins, at = at, _behind(_found(text, [str(message["content"] or "").strip()], at), at)
        if made := message.get("tool_calls"):
            calls = []
            for call in made:
                calls.append(_call(text, call["function"], at))
                at = _behind(calls[-1], at)
    return Characters(_answer(text, scored, begins), _joined(calls), _joined(results))


def token_span(part: Span, text: str, positions: np.ndarray, offsets: np.ndarray, end: int) -> Span | None:
    """A part of a text as positions of its tokens; None where not all of these were recorded.

    Args:
        part: in characters.
        text: that it is of.
        positions: of the recorded tokens, one after the other, `[rows]`.
        offsets: characters before each of them, `[rows]`.
        end: up to which character the last of them is known to reach.
    """
    if part[0] < offsets[0] or part[1] > end:
        return None
    first = int(np.searchsorted(offsets, part[0], side="right")) - 1
    if offsets[first] == part[0]:  # tokens of one character, of a byte or more each, have the same offset
        further = len(text[part[0] : part[0] + 1].encode(errors="surrogatepass")) - 1
        first = max(int(np.searchsorted(offsets, part[0], side="left")), first - further)
    behind = int(np.searchsorted(offsets, part[1], side="left"))
    return (int(positions[0]) + first, int(positions[0]) + behind)


def spans_of(run: "RunBatches", sample: Sample, turn: int, rule: Rule) -> dict[str, Span | None]:
    """The parts of a stored run as tokens, by name; none where it was stored without its text or offsets.

    Args:
        run: the stored run.
        sample: the sample that it is of.
        turn: which of the sample's answers it generated, from 0.
        rule: which number was scored.
    """
    text, batches = run.facts.text, run.batches
    named = all("text_offset" in batch.schema.names and not batch["text_offset"].null_count for batch in batches)
    if text is None or not named:
        return {}
    positions, offsets = (
        pa.concat_arrays([batch[name] for batch in batches]).to_numpy() for name in ("position", "text_offset")
    )
    messages = since_prompt(sample)
    ends = [number for number, message in enumerate(messages, 1) if message["role"] == "assistant"]
    answer = score(sample.completion or "", sample.gold, rule).answer if turn == len(sample.turns) - 1 else None
    scored = (sample.completion or "", (answer.start, answer.end)) if answer else None
    prompt = str(sample.messages[len(sample.messages) - len(messages) - 1]["content"])
    parts = characters(text, prompt, messages[: ends[turn]], scored)
    is_last = positions[-1] + 1 == run.facts.tokens
    end = len(text) if is_last else int(offsets[-1])  # else where the last recorded token ends is not known
    return {name: part and token_span(part, text, positions, offsets, end) for name, part in parts._asdict().items()}


def _answer(text: str, scored: tuple[str, Span] | None, begins: int) -> Span | None:
    """The scored number in the last of the places that hold the scored text: thoughts come before it."""
    if scored is None:
        return None
    answer, (start, end) = scored
    place = text.rfind(answer.strip(), begins)
    at = place - (len(answer) - len(answer.lstrip()))
    return (at + start, at + end) if place >= 0 else None


def _call(text: str, function: dict[str, str], at: int) -> Span | None:
    """From a function's name to the end of its arguments, in the next place that has these."""
    arguments = function["arguments"]
    spellings = [arguments]
    with suppress(ValueError, RecursionError):
        value = json.loads(arguments)
        spellings += [json.dumps(value, ensure_ascii=False), json.dumps(value)]
    place = _found(text, spellings, at)
    if place is None:
        return None
    name = text.rfind(function["name"], at, place[0])
    return (place[0] if name < 0 else name, place[1])


def _result(text: str, content: str, at: int) -> Span | None:
    """The next place that has a tool's result, which is no part of a longer word or number."""
    for spelling in (content.strip(), json.dumps(content)[1:-1]):
        if spelling and (match := re.compile(rf"(?<![\w-]){re.escape(spelling)}(?![\w-])").search(text, at)):
            return match.span()
    return None


def _found(text: str, spellings: Iterable[str], at: int) -> Span | None:
    """The next place of the first of some spellings that there is."""
    places = ((text.find(spelling, at), len(spelling)) for spelling in spellings if spelling)
    return next(((start, start + length) for start, length in places if start >= 0), None)


def _behind(span: Span | None, at: int) -> int:
    return at if span is None else span[1]


def _joined(spans: Sequence[Span | None]) -> Span | None:
    """From the first to the last, which follow one another; None where there is none, or one was not found."""
    known = [span for span in spans if span]
    return (known[0][0], known[-1][1]) if known and len(known) == len(spans) else None
