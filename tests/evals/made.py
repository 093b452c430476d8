"""Results directories as a run leaves them, written by the real writer, without a server."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from evals.config import Config
from evals.gsm8k.summary import conclude
from evals.results.results import Results
from evals.task.rewards import load_rewards
from evals.task.steering import asked
from evals.task.trajectory import Problem, Sample, Turn, scored

Change = Callable[[Sample], Sample]
HOSTILE = (
    "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\"> & <b>bold</b>"
    "\u2028\x85"
)


def make_results(
    directory: Path,
    problems: int = 6,
    *,
    modes: Sequence[str] = ("no-tools", "with-tools"),
    variants: Sequence[str] = ("control",),
    seed: int = 0,
    text: str = "",
    skill: float = 0.6,
    activations: Callable[[str], dict[str, Any]] | None = None,
    **options: Any,
) -> Path:
    """Samples that follow from the seed; `skill` is the share of right answers without tools in the control.

    Args:
        directory: a new one.
        problems: how many.
        modes: of them.
        variants: of each.
        seed: of what is answered.
        text: put into each answer.
        skill: from 0 to 1.
        activations: gives the `activations_meta` of a run, by its id.
        options: of the config.
    """
    mode = modes[0] if len(modes) == 1 else "both"
    given = {"model": "fake/model", "dataset": "demo", "mode": mode}
    given |= {"variants": {name: "" if name == "control" else "Hurry!" for name in variants}}
    given |= {"session_id": "evaluated", "rewards": {"correctness": 1.0, "efficiency": 0.5, "tool_use": 0.1}}
    given |= {"collect_activations": activations is not None, "temperature": 0.0}
    config = Config(**given | {"results_dir": directory} | options)
    facts = {
        "config": config.model_dump(mode="json"),
        "versions": {"python": "3.11", "vitrine": "0.1.0"},
        "model": {"id": config.model},
        "server": {"options": None, "versions": None},
        "prompts": {"instruction": "Solve it.", "variants": config.variants, "few_shot": []},
        "dataset": {"path": "demo.jsonl", "sha256": "0" * 64, "problems": problems},
        "host": "here",
    }
    reward = load_rewards(config.rewards)
    with Results.create(directory, facts) as results:
        clock, conditions = 1.8e9, asked(config)
        for mode in modes:
            for number in range(problems):
                for variant in conditions:
                    draw = random.Random(f"{seed}.{number}.{mode}.{variant}")
                    luck = random.Random(f"{number}").random() * 0.8 + draw.random() * 0.2  # hard ones are hard in all
                    harder = 0.1 * conditions.index(variant) / len(conditions) - 0.15 * (mode == "with-tools")
                    sample = _sample(number, mode, variant, draw, luck < skill - harder, text, clock, activations)
                    sample = sample if sample.error else scored(sample, config.rule)
                    results.add(reward(sample))
                    clock += 0.05
    conclude(directory, None)
    return directory


def _sample(
    number: int,
    mode: str,
    variant: str,
    draw: random.Random,
    right: bool,
    text: str,
    clock: float,
    activations: Callable[[str], dict[str, Any]] | None,
) -> Sample:
    problem = Problem(
        f"{number:012x}", f"Anna has {number} apples and buys {number + 7} more. How many?", str(2 * number + 7)
    )
    key = f"{problem.id}-{mode}-{variant}"
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{problem.question} {text}"}]
    turns: list[Turn] = []
    seconds = draw.lognormvariate(-0.5, 0.5)

    def turn(finish: str, tokens: int) -> None:
        run = activations(f"{key}-{len(turns)}") if activations else None
        turns.append(
            Turn(finish_reason=finish, prompt_tokens=60, completion_tokens=tokens, latency_s=seconds, activations=run)
        )

    if mode == "with-tools":
        broken = draw.random() < 0.1
        arguments = json.dumps({"expression": f"{number} + + {number + 7}" if broken else f"{number} + {number + 7}"})
        call = {"id": "call-1", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        result = "error: not an expression" if broken else problem.gold
        messages.append({"role": "tool", "tool_call_id": "call-1", "content": result})
        turn("tool_calls", draw.randrange(10, 40))
    kind = "right" if right else draw.choice(["wrong"] * 5 + ["invalid", "cut", "failed"])
    answers = {
        "right": f"{number} and {number + 7} make {problem.gold}. {text}\n#### {problem.gold}",
        "wrong": f"I think it is 1. {text}\n#### 1",
        "invalid": f"It is {problem.gold}, perhaps. {text}",
        "cut": f"Well, let me think about it {text}" + " and think" * draw.randrange(10),
    }
    error = None
    if kind == "failed":
        error = f"HTTP 503: no room {text} (attempt 9 of 9)"
    else:
        messages.append({"role": "assistant", "content": answers[kind]})
        turn("length" if kind == "cut" else "stop", 512 if kind == "cut" else int(draw.lognormvariate(4.5, 0.5)))
    return Sample(
        id=problem.id,
        mode=mode,
        variant=variant,
        question=problem.question,
        gold=problem.gold,
        finish_reason=turns[-1].finish_reason if turns else None,
        error=error,
        started=clock,
        ended=clock + seconds * len(turns),
        latency_s=seconds * len(turns),
        turns=turns,
        messages=messages,
    )
