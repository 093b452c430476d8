"""The runs of a results directory as a server would have stored them: with tags, text and offsets."""

from pathlib import Path
from typing import Any

import torch

from deployments.activations.facts import FileInfo, RunInfo
from deployments.activations.index.index import Index
from deployments.activations.segments.columns import to_batch
from deployments.activations.writer.writer import Writer
from evals.results.results import read_samples
from evals.task.records import since_prompt
from evals.task.trajectory import Sample

POINT = "layers.0.output"


def says(store: Path, session: str, point: str = POINT) -> Any:
    """What an answer says of its run, by the run's id, before there is one."""

    def meta(run_id: str) -> dict[str, Any]:
        at = {"uri": f"{(store / '_' / session).as_uri()}/1.arrow", "first_row": 0, "shape": [9, 4], "dtype": "float32"}
        run = {"index": 0, "run_id": run_id, "tokens": 90, "prompt_tokens": 70, "points": {point: at}}
        return {"session_id": session, "status": "stored", "runs": [run]}

    return meta


def text_of(sample: Sample, turn: int) -> tuple[str, str]:
    """A run's prompt and what it generated."""
    said = since_prompt(sample)
    answer = [number for number, message in enumerate(said) if message["role"] == "assistant"][turn]
    messages = sample.messages[: len(sample.messages) - len(said)] + said[: answer + 1]
    *before, last = [
        "".join([f"<|{m['role']}|>", m["content"] or "", *map(_call, m.get("tool_calls") or ())]) for m in messages
    ]
    start = "<|assistant|>"
    return "<|end|>".join([*before, start]), last.removeprefix(start) + "<|end|>"


def _call(call: dict[str, Any]) -> str:
    return f"<call>{call['function']['name']}({call['function']['arguments']})"


def record(
    store: Path, results: Path, *, point: str = POINT, width: int = 4, last: int | None = None, text: bool = True
) -> None:
    """Stores a run for each that the samples name, a token for each three characters; of these the `last` ones."""
    store.mkdir(exist_ok=True)
    writer = Writer(store, Index.scanned(store))
    for sample in read_samples(results):
        for turn, run in enumerate(sample.runs):
            session = str((sample.turns[turn].activations or {})["session_id"])
            prompt, generated = text_of(sample, turn)
            offsets = [*range(0, len(prompt), 3), *range(len(prompt), len(prompt + generated), 3)]
            tokens, many = len(offsets), -(-len(prompt) // 3)
            rows = list(range(tokens))[-last if last else 0 :]
            segment = FileInfo(session, "fake/model", None, "Qwen3ForCausalLM", {"torch": "2"}, {point: point})
            batch = to_batch(
                segment,
                run_id=run["run_id"],
                sample_id=sample.id,
                positions=rows,
                token_ids=rows,
                prompt_tokens=many,
                points={point: torch.randn(len(rows), width).bfloat16()},
                text_offsets=[offsets[row] for row in rows],
            )
            tags = {"mode": sample.mode, "variant": sample.variant, "eval": "gsm8k", "turn": str(turn)}
            said = prompt + generated if text else None
            facts = RunInfo(
                run["run_id"], session, "fake/model", 1.0, many, tokens, sample_id=sample.id, tags=tags, text=said
            )
            writer.submit(facts, [batch]).result()
    writer.close()
