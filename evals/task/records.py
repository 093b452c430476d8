"""A sample as the other files of the results hold it: a line of the dataset, a trajectory, an agent's state."""

from typing import Any

from deployments.demo_model.calculator import ERROR
from evals.activations_meta import points_of, runs_of
from evals.scoring import RULES
from evals.task.trajectory import Sample

Record = dict[str, Any]


def dataset_row(sample: Sample) -> Record:
    """The sample's line in dataset.jsonl."""
    uris = {uri for run in sample.runs for at in points_of(run).values() if isinstance(uri := at.get("uri"), str)}
    metas = [turn.activations for turn in sample.turns if turn.activations]
    kept = sample.model_dump(exclude={"turns", "messages", "activations"})
    return kept | {
        "turns": len(sample.turns),
        "tool_calls": sum(len(message.get("tool_calls") or []) for message in since_prompt(sample)),
        "usage": {"prompt_tokens": sample.prompt_tokens, "completion_tokens": sample.completion_tokens},
        "session_id": metas[0].get("session_id") if metas else None,
        "run_ids": [run["run_id"] for run in sample.runs],
        "activation_uris": sorted(uris),
    }


def trajectory(sample: Sample) -> list[Record]:
    """One record a message, in order; the model's have what their requests cost and recorded."""
    turns = iter(sample.turns)
    asked = len(sample.messages) - len(since_prompt(sample))
    steps: list[Record] = []
    for number, message in enumerate(sample.messages):
        step = {"step": number} | message
        if message["role"] == "tool":
            step["error"] = is_error(message)
        elif number >= asked and message["role"] == "assistant":
            turn = next(turns)
            step |= turn.model_dump(exclude={"activations"})
            step["run_ids"] = [run["run_id"] for run in runs_of(turn.activations or {})]
        steps.append(step)
    return steps


def agent_state(sample: Sample) -> Record:
    """Where the agent stood at the end."""
    names = {"id", "mode", "variant", "epoch", "gold", "finish_reason", "turn_limit", "error", "rewards", "reward"}
    return sample.model_dump(include=names) | {
        "status": sample.outcome,
        "turns": len(sample.turns),
        "tool_calls": tool_calls(sample),
        "prompt_tokens": sample.prompt_tokens,
        "completion_tokens": sample.completion_tokens,
        "answer": {rule: sample.answer(rule) for rule in RULES},
        "run_ids": [run["run_id"] for run in sample.runs],
    }


def tool_calls(sample: Sample) -> list[Record]:
    """Each call with its result, in order; a call of an answer that was cut has None."""
    messages = since_prompt(sample)
    made: list[Record] = []
    for index, message in enumerate(messages):
        for offset, call in enumerate(message.get("tool_calls") or [], start=index + 1):
            result = messages[offset] if offset < len(messages) else None
            made.append(
                {
                    "name": call["function"]["name"],
                    "arguments": call["function"]["arguments"],
                    "result": result["content"] if result else None,
                    "error": bool(result and is_error(result)),
                }
            )
    return made


def is_error(message: Record) -> bool:
    """Whether a tool's message says what was wrong with its call."""
    return str(message["content"]).startswith(ERROR)


def since_prompt(sample: Sample) -> list[Record]:
    """The messages since the prompt: the model's turns and the tools' results."""
    turns, number = len(sample.turns), len(sample.messages)
    while turns:  # from the end: worked examples in the prompt are the assistant's too
        number -= 1
        turns -= sample.messages[number]["role"] == "assistant"
    return sample.messages[number:]
