"""One problem in one mode and variant: a single turn, or the tool loop. The result is a `Sample`."""

import hashlib
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from deployments.demo_model.calculator import TOOL, answer_call
from evals.activations_meta import runs_of
from evals.config import Config, Mode
from evals.scoring import RULES, Rule, Score, score
from evals.server.answers import AnswerLate, RequestFailed
from evals.server.client import PRESET
from evals.task import steering
from evals.task.prompts import Prompts

MAX_TURNS = 12  # answers to a problem with tools
CONTEXT_EXCEEDED = "context_length_exceeded"  # OpenAI's word
Chat = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
TIMEOUT = "timeout"  # of `finish_reason`
Outcome = Literal["correct", "wrong", "invalid", "truncated", "timed_out", "turn_limit", "failed"]


class Problem(NamedTuple):
    """A GSM8K problem: `id` is made of the question's text, `gold` is the number that ends the answer."""

    id: str
    question: str
    gold: str


class Turn(BaseModel):
    """One request and its response, in `turns` of a sample.

    Attributes:
        finish_reason: The response's `finish_reason`.
        prompt_tokens: Tokens of the prompt.
        completion_tokens: New tokens.
        reasoning_tokens: New tokens of reasoning, if the server counts them.
        latency_s: Seconds, including retries.
        preset: The preset that the server used.
        readouts: The response's `readouts`, if `extra_body` requests them.
        activations: The response's `activations_meta`.
    """

    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    latency_s: float
    preset: str | None = None
    readouts: dict[str, Any] | None = None
    activations: dict[str, Any] | None


UNSCORED: dict[str, Any] = {"correct": None, "rewards": {}, "reward": None}


class Sample(BaseModel):
    """One problem in one mode and variant: samples/<problem>.<mode>.<variant>.json, from epoch 2 on with .<epoch>.

    Attributes:
        id: The problem's id, a digest of its question.
        mode: `no-tools` or `with-tools`.
        variant: The prompt variant, or the steered condition.
        epoch: The number of the answer, from 1.
        question: The problem's text.
        gold: The correct number.
        outcome: How the sample ended.
        completion: The text of the last answer.
        strict: The answer that the rule `strict` finds.
        flexible: The answer that the rule `flexible` finds.
        normalized: The answer that the rule `normalized` finds.
        correct: Whether the answer is right by the evaluation's rule; null if the sample failed.
        correct_strict: Whether it is right by `strict`.
        correct_flexible: Whether it is right by `flexible`.
        correct_normalized: Whether it is right by `normalized`.
        finish_reason: That of the last turn; `length` if the next turn did not fit the context, `timeout` if it took
            too long.
        turn_limit: Whether the model still called tools at the last turn.
        error: Why the next turn has no response.
        started: When the first request was sent, in Unix seconds.
        ended: When the last response arrived, in Unix seconds.
        latency_s: Seconds of all turns.
        rewards: Values by the reward's name.
        reward: Their weighted sum; null if the sample failed.
        turns: One entry for each request.
        messages: The conversation.
        activations: The values of `inline_activations`, by run and point.
    """

    id: str
    mode: Mode
    variant: str
    epoch: int = 1
    question: str
    gold: str
    outcome: Outcome = "failed"
    completion: str | None = None
    strict: str | None = None
    flexible: str | None = None
    normalized: str | None = None
    correct: bool | None = None
    correct_strict: bool | None = None
    correct_flexible: bool | None = None
    correct_normalized: bool | None = None
    finish_reason: str | None = None
    turn_limit: bool = False
    error: str | None = None
    started: float
    ended: float
    latency_s: float
    rewards: dict[str, float] = {}
    reward: float | None = None
    turns: list[Turn]
    messages: list[dict[str, Any]]
    activations: dict[str, Any] | None = None

    @property
    def key(self) -> str:
        """What the files of this sample are named by."""
        return sample_key(self.id, self.mode, self.variant, self.epoch)

    def answer(self, rule: Rule) -> str | None:
        """The answer that a rule finds."""
        text: str | None = getattr(self, rule)
        return text

    def correct_by(self, rule: Rule) -> bool:
        """Whether that is the gold number."""
        return bool(getattr(self, f"correct_{rule}"))

    @property
    def prompt_tokens(self) -> int:
        """Of all turns."""
        return sum(turn.prompt_tokens for turn in self.turns)

    @property
    def completion_tokens(self) -> int:
        """Of all turns."""
        return sum(turn.completion_tokens for turn in self.turns)

    @property
    def reasoning(self) -> str:
        """What the model thought, of all its answers."""
        return "\n".join(
            str(message["reasoning_content"]) for message in self.messages if "reasoning_content" in message
        )

    @property
    def runs(self) -> list[dict[str, Any]]:
        """What the server said of each recorded run, in the order of the turns."""
        return [run for turn in self.turns for run in runs_of(turn.activations or {})]


def sample_key(problem: str, mode: str, variant: str, epoch: int = 1) -> str:
    """What the files of one sample are named by."""
    return f"{problem}.{mode}.{variant}" + (f".{epoch}" if epoch > 1 else "")


async def run_problem(
    chat: Chat, problem: Problem, mode: Mode, variant: str, config: Config, prompts: Prompts, epoch: int = 1
) -> Sample:
    """Talks until an answer calls no tool, is cut, comes too late, or is the last allowed; a failure is in the sample.

    A conversation that outgrows the context or an answer that is late is the model's: the sample counts. Any other
    request without an answer is the server's, or that of `max_tokens` for which a question leaves no room, and the
    sample has failed.
    """
    started, clock = time.time(), time.perf_counter()
    prompt, interventions = steering.find(config, variant)
    messages = prompts.messages(problem.question, prompt)
    turns: list[Turn] = []
    error: str | None = None
    cut: str | None = None  # a finish reason, where the conversation grew too long for the context or the time limit
    calls: list[dict[str, Any]] = []
    try:
        for number in range(MAX_TURNS if mode == "with-tools" else 1):
            capture = {"sample_id": problem.id, "tags": _tags(mode, variant, epoch, number, config)}
            body = request_body(messages, mode, capture, config)
            body |= _request_seed(config, sample_key(problem.id, mode, variant, epoch), number)
            body |= {"interventions": interventions} if interventions else {}
            turn, message = await _take_turn(chat, body)
            turns.append(turn)
            messages.append(message)
            calls = message.get("tool_calls") or []
            if not calls or turn.finish_reason == "length":
                break
            messages += [_tool_message(call) for call in calls]
    except AnswerLate as late:
        cut, error = TIMEOUT, str(late)
    except RequestFailed as failure:
        cut, error = _cut_by(failure, bool(turns))
    sample = Sample(
        **problem._asdict(),
        mode=mode,
        variant=variant,
        epoch=epoch,
        finish_reason=cut or (turns[-1].finish_reason if turns else None),
        turn_limit=mode == "with-tools" and len(turns) == MAX_TURNS and bool(calls),
        error=error,
        started=started,
        ended=time.time(),
        latency_s=time.perf_counter() - clock,
        turns=turns,
        messages=messages,
    )
    return sample if error and not cut else scored(sample, config.rule)


def _tags(mode: Mode, variant: str, epoch: int, turn: int, config: Config) -> dict[str, str]:
    """The tags of a turn's runs."""
    epochs = {"epoch": str(epoch)} if config.epochs > 1 else {}
    return {"mode": mode, "variant": variant, "eval": "gsm8k"} | epochs | {"turn": str(turn)}


def _cut_by(failure: RequestFailed, has_turns: bool) -> tuple[str | None, str]:
    """The finish reason, where a request failed because the conversation outgrew the context, and the error."""
    error = str(failure)
    if failure.code != CONTEXT_EXCEEDED:
        return None, error
    if not has_turns and failure.param == "max_tokens":  # the question alone fits
        return None, f"{error}: lower --max-tokens"
    return "length", error


def failed(problem: Problem, mode: Mode, variant: str, error: str, epoch: int = 1) -> Sample:
    """The sample of a problem that could not be asked to an end."""
    now = time.time()
    return Sample(
        **problem._asdict(),
        mode=mode,
        variant=variant,
        epoch=epoch,
        error=error,
        started=now,
        ended=now,
        latency_s=0.0,
        turns=[],
        messages=[],
    )


def scored(sample: Sample, rule: Rule) -> Sample:
    """The sample with the scores of its last answer.

    Args:
        sample: one that did not fail, with its messages.
        rule: decides `correct` and the outcome.
    """
    answers = (m["content"] for m in reversed(sample.messages) if m["role"] == "assistant")
    text = (next(answers, None) if sample.turns else None) or ""  # without a turn, worked examples are all that is said
    by = {name: score(text, sample.gold, name) for name in RULES}
    fields: dict[str, Any] = {"completion": text, "correct": by[rule].correct}
    for name, its in by.items():
        fields |= {name: its.answer.text if its.answer else None, f"correct_{name}": its.correct}
    return sample.model_copy(update=fields | {"outcome": _outcome(sample, by[rule])})


def _outcome(sample: Sample, by_rule: Score) -> Outcome:
    """The one kind of a sample that did not fail: a cut, late or endless answer is not called wrong."""
    if by_rule.correct:
        return "correct"
    if sample.finish_reason == "length":
        return "truncated"
    if sample.finish_reason == TIMEOUT:
        return "timed_out"
    if sample.turn_limit:
        return "turn_limit"
    return "invalid" if by_rule.answer is None else "wrong"


async def _take_turn(chat: Chat, body: dict[str, Any]) -> tuple[Turn, dict[str, Any]]:
    clock = time.perf_counter()
    answer = await chat(body)
    choice = answer["choices"][0]
    usage = answer.get("usage") or {}
    turn = Turn(
        finish_reason=choice.get("finish_reason"),
        prompt_tokens=usage.get("prompt_tokens") or 0,
        completion_tokens=usage.get("completion_tokens") or 0,
        reasoning_tokens=(usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0,
        latency_s=time.perf_counter() - clock,
        activations=answer.get("activations_meta"),
        preset=answer.get(PRESET),
        readouts=choice.get("readouts"),
    )
    # Only these go back in the next turn: the server refuses fields it does not know.
    message = {"role": "assistant", "content": choice["message"].get("content")}
    for name in ("reasoning_content", "tool_calls"):  # thoughts go back, too: templates show them to the model again
        if choice["message"].get(name):
            message[name] = choice["message"][name]
    return turn, json.loads(
        json.dumps(message, ensure_ascii=False).encode("utf-8", "replace")
    )  # half an emoji is no text


def _tool_message(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {
        "role": "tool",
        "tool_call_id": call["id"],
        "content": answer_call(function["name"], function["arguments"]).encode("utf-8", "replace").decode(),
    }


def request_body(messages: list[dict[str, Any]], mode: Mode, capture: dict[str, Any], config: Config) -> dict[str, Any]:
    """The chat request of one turn, with the capture fields where activations are collected.

    Args:
        messages: all so far.
        mode: whether the calculator is offered.
        capture: what the run is to be found by.
        config: the run's options.
    """
    body: dict[str, Any] = {
        "model": config.model,
        "messages": messages,
        "max_tokens": config.max_tokens,
        "temperature": config.temperature or 0.0,
        **config.extra_body,
    }
    if mode == "with-tools":
        body["tools"] = [TOOL]
    if config.collect_activations:
        body["session_id"] = config.session_id
        body["store_activations"] = True
        body["capture"] = config.capture | capture | {"store_text": True}
    return body


def _request_seed(config: Config, key: str, turn: int) -> dict[str, int]:
    """What a turn's sampling hangs on: the run's seed, the sample and the turn, so that a run repeats.

    Greedy answers need none.
    """
    if not config.temperature:
        return {}
    return {"seed": int.from_bytes(hashlib.sha256(f"{config.seed}:{key}:{turn}".encode()).digest()[:4], "big") >> 1}
