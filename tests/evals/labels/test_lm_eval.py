"""Samples of lm_eval join the runs that answered them, and no run of another answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from deployments.activations.facts import FileInfo, RunInfo
from deployments.activations.index.index import Index
from deployments.activations.segments.columns import to_batch
from deployments.activations.writer.writer import Writer
from evals.config import EvalError
from evals.labels.__main__ import main
from evals.labels.lm_eval import labelled, messages_hash

SESSION = "lm"
QUESTION = "Question: 3 + 4?\nAnswer:"
Store = Callable[..., None]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """`store(run_id, asked, model)`: stores a run of two tokens."""
    writer = Writer(tmp_path, Index.scanned(tmp_path))

    def write(run_id: str, asked: Any, model: str = "m") -> None:
        segment = FileInfo(SESSION, model, None, "Qwen3ForCausalLM", {"torch": "2"}, {"norm.output": "norm"})
        places = {"positions": [0, 1], "token_ids": [0, 1], "prompt_tokens": 1}
        batch = to_batch(segment, run_id=run_id, sample_id=None, points={"norm.output": torch.zeros(2, 4)}, **places)
        facts = RunInfo(run_id, SESSION, model, 1.0, 1, 2, messages_hash=messages_hash(asked))
        writer.submit(facts, [batch]).result()

    yield write
    writer.close()


def sample(*arguments: dict[str, Any], doc_id: int = 0, resps: list[Any], **scores: float) -> dict[str, Any]:
    asked = {f"gen_args_{number}": given for number, given in enumerate(arguments)}
    return {
        "doc_id": doc_id,
        "doc_hash": f"h{doc_id}",
        "arguments": asked,
        "resps": resps,
        "metrics": [*scores],
    } | scores


def generated(prompt: str, *answers: str, doc_id: int = 0, until: list[str] | str = "\n\n", **scores: float) -> Any:
    return sample({"arg_0": prompt, "arg_1": {"until": until}}, doc_id=doc_id, resps=[[*answers]], **scores)


def logged(folder: Path, *samples: dict[str, Any]) -> Path:
    path = folder / "samples_x.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in samples))
    return path


def test_a_run_that_is_the_only_one_of_its_prompt_has_the_scores(
    tmp_path: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store("first", [QUESTION])
    store("second", [QUESTION])  # of a second evaluation
    store("other", ["Question: 1?"])
    path = logged(
        tmp_path,
        generated(QUESTION, " It is 7.", exact_match=1.0),
        generated("Question: 1?", " 1", doc_id=1, exact_match=0.0),
    )
    assert main(["--lm-eval", str(path), "--session", SESSION, "--store", str(tmp_path)]) == 0
    rows = pq.read_table(tmp_path / "labels.parquet").to_pylist()
    assert {row["run_id"]: row["exact_match"] for row in rows} == {"other": 0.0}
    assert "2 runs that share their prompts" in capsys.readouterr().out
    path = logged(tmp_path, generated(QUESTION, " It is 7.", acc=1.0))
    with pytest.raises(EvalError, match="none of the 3 runs in session lm .* 2 share their prompts with others"):
        labelled(path, SESSION, tmp_path)


def test_runs_of_several_models_are_refused_until_one_is_chosen(
    tmp_path: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = [{"role": "user", "content": QUESTION}]
    for model in ("large", "small"):
        store(model, chat, model=model)
    asked = [json.dumps([{"role": "user", "content": QUESTION, "type": "text"}])]
    path = logged(tmp_path, generated(asked, "7", acc=1.0))
    command = ["--lm-eval", str(path), "--session", SESSION, "--store", str(tmp_path)]
    assert main(command) == 2
    assert "of several models: choose large or small with --model" in capsys.readouterr().err
    assert main([*command, "--model", "small"]) == 0
    assert pq.read_table(tmp_path / "labels.parquet")["run_id"].to_pylist() == ["small"]


def test_a_loglikelihood_is_of_the_run_whose_prompt_has_its_continuation(tmp_path: Path, store: Store) -> None:
    choices = [" seven", " eight"]
    for choice in choices:
        store(choice.strip(), [QUESTION + choice])
    given = ({"arg_0": QUESTION, "arg_1": choice} for choice in choices)
    path = logged(tmp_path, sample(*given, resps=[[["-0.1", "True"]], [["-4.0", "False"]]], acc=1.0))
    rows = labelled(path, SESSION, tmp_path).to_pylist()
    assert {row["run_id"]: row["argument"] for row in rows} == {"seven": "gen_args_0", "eight": "gen_args_1"}
    assert {(row["sample_id"], row["problem"], row["acc"]) for row in rows} == {("0", "h0", 1.0)}
