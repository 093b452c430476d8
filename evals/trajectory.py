"""One problem in one mode: a single turn, or the tool loop. What came of it is a `Sample`."""

import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from pydantic import BaseModel

from deployments.demo_model.calculator import TOOL, answer_call
from deployments.demo_model.dialogues import INSTRUCTION
from evals.client import RequestFailed
from evals.config import Config, Mode
from evals.scoring import flexible_match, is_correct, strict_match

Chat = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class Problem(NamedTuple):
    """A GSM8K problem: `id` is made of the question's text, `gold` is the number that ends the answer."""

    id: str
    question: str
    gold: str


class Turn(BaseModel):
    """One request and its answer."""

    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    latency_s: float  # retries included
    activations: dict[str, Any] | None  # activations_meta as the server gave it


class Sample(BaseModel):
    """One problem in one mode: what was said, how it scored, where its activations lie."""

    id: str
    mode: Mode
    question: str
    gold: str
    completion: str | None = None
    strict: str | None = None
    flexible: str | None = None
    correct: bool | None = None  # by the strict rule; None where the sample failed
    correct_flexible: bool | None = None
    finish_reason: str | None = None
    turn_limit: bool = False  # still calling tools at the last turn allowed
    error: str | None = None
    started: float  # seconds since the epoch
    ended: float
    latency_s: float
    turns: list[Turn]
    messages: list[dict[str, Any]]


async def run_problem(chat: Chat, problem: Problem, mode: Mode, config: Config) -> Sample:
    """Talks until an answer calls no tool, is cut, or is the last allowed; a failure is in the sample."""
    started, clock = time.time(), time.perf_counter()
    messages: list[dict[str, Any]] = [{"role": "user", "content": problem.question + INSTRUCTION}]
    turns: list[Turn] = []
    error: str | None = None
    calls: list[dict[str, Any]] = []
    try:
        for number in range(config.max_turns if mode == "with-tools" else 1):
            turn, message = await _take_turn(chat, request_body(messages, problem.id, mode, number, config))
            turns.append(turn)
            messages.append(message)
            calls = message.get("tool_calls") or []
            if not calls or turn.finish_reason == "length":
                break
            messages += [_tool_message(call) for call in calls]
    except RequestFailed as failure:
        error = str(failure)
    sample = Sample(
        id=problem.id,
        mode=mode,
        question=problem.question,
        gold=problem.gold,
        finish_reason=turns[-1].finish_reason if turns else None,
        turn_limit=mode == "with-tools" and len(turns) == config.max_turns and bool(calls),
        error=error,
        started=started,
        ended=time.time(),
        latency_s=time.perf_counter() - clock,
        turns=turns,
        messages=messages,
    )
    return sample if error else scored(sample)


def scored(sample: Sample) -> Sample:
    """The sample with the scores of its last assistant message."""
    text = next((m["content"] for m in reversed(sample.messages) if m["role"] == "assistant"), None) or ""
    return sample.model_copy(
        update={
            "completion": text,
            "strict": strict_match(text),
            "flexible": flexible_match(text),
            "correct": is_correct(text, sample.gold, "strict"),
            "correct_flexible": is_correct(text, sample.gold, "flexible"),
        }
    )


def request_body(
    messages: list[dict[str, Any]], sample_id: str, mode: Mode, turn: int, config: Config
) -> dict[str, Any]:
    """The chat request of one turn, with the capture fields where activations are collected."""
    body: dict[str, Any] = {
        "model": config.model,
        "messages": messages,
        "max_tokens": config.max_tokens,
        "temperature": config.temperature,
    }
    if mode == "with-tools":
        body["tools"] = [TOOL]
    if config.collect_activations:
        tags = {"mode": mode, "eval": "gsm8k", "turn": str(turn)}
        where = {"points": config.points, "layers": config.layers, "sites": config.sites}
        capture = {name: value for name, value in where.items() if value}
        body["session_id"] = config.session_id
        body["store_activations"] = True
        body["capture"] = capture | {"sample_id": sample_id, "tags": tags}
    return body


async def _take_turn(chat: Chat, body: dict[str, Any]) -> tuple[Turn, dict[str, Any]]:
    clock = time.perf_counter()
    answer = await chat(body)
    choice = answer["choices"][0]
    usage = answer.get("usage") or {}
    turn = Turn(
        finish_reason=choice.get("finish_reason"),
        prompt_tokens=usage.get("prompt_tokens", 0),
        completion_tokens=usage.get("completion_tokens", 0),
        latency_s=time.perf_counter() - clock,
        activations=answer.get("activations_meta"),
    )
    # Only OpenAI's fields go back in the next turn: the server refuses fields it does not know.
    message = {"role": "assistant", "content": choice["message"].get("content")}
    if choice["message"].get("tool_calls"):
        message["tool_calls"] = choice["message"]["tool_calls"]
    return turn, message


def _tool_message(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {
        "role": "tool",
        "tool_call_id": call["id"],
        "content": answer_call(function["name"], function["arguments"]),
    }
