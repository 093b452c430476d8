"""inspect_ai over its OpenAI-compatible provider, with a tool."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def log(run_script, tmp_path_factory):
    return run_script("inspect_gsm8k.py", tmp_path_factory.mktemp("inspect"))


@pytest.mark.long  # two evaluations; tests/vitrine/inspect runs the provider
def test_an_evaluation_with_a_calculator_says_what_evals_gsm8k_says(log, evaluated):
    assert log["status"] == "success", log["error"]
    ours = evaluated["with-tools"]
    samples = {sample["question"]: sample for sample in log["samples"][:20]}
    assert {q: sample["answer"] for q, sample in samples.items()} == {q: one["completion"] for q, one in ours.items()}
    assert {q: sample["correct"] for q, sample in samples.items()} == {q: one["correct"] for q, one in ours.items()}
    assert {q: sample["calls"] for q, sample in samples.items()} == {
        q: len(one["turns"]) - 1 for q, one in ours.items()
    }
    assert all(sample["stop_reason"] == "stop" for sample in samples.values())
    for question, sample in samples.items():
        last = ours[question]["turns"][-1]
        assert sample["tokens"] == [last["prompt_tokens"], last["completion_tokens"]]


@pytest.mark.long
def test_a_prompt_that_is_too_long_is_told_apart_from_an_error(log):
    assert log["samples"][20]["stop_reason"] == "model_length"
