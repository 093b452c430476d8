"""lm_eval as its users run it, against the served model, through a task of local problems."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from deployments.demo_model import WEIGHTS
from evals.labels.lm_eval import labelled

ROOT = Path(__file__).parents[2]
TASKS = Path(__file__).parent / "tasks"
LOCAL = {"tokenizer": str(WEIGHTS), "tokenizer_backend": "huggingface"}
RECORDED = {"header": {"X-Vitrine-Session": "lm-eval", "X-Vitrine-Tags": '{"task": "demo_gsm8k"}'}}


@pytest.fixture(scope="module")
def run(clients, served, tmp_path_factory):
    """Run one task by one model type; gives the file of the logged samples."""

    def evaluate(kind: str, task: str, route: str, more: dict, *options: str) -> Path:
        results = tmp_path_factory.mktemp("lm_eval")
        given = {"model": "vitrine-demo", "base_url": f"{served.base_url}/{route}", "num_concurrent": 8} | more
        command = ["lm_eval", "--model", kind, "--model_args", json.dumps(given), "--tasks", task]
        command += ["--include_path", str(TASKS)]
        command += ["--limit", "20", "--log_samples", "--output_path", str(results), *options]
        done = subprocess.run(command, cwd=ROOT, env=clients, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        (samples,) = results.rglob("samples_*.jsonl")
        return samples

    return evaluate


def read(samples: Path) -> list[dict]:
    return [json.loads(line) for line in samples.read_text().splitlines()]


@pytest.fixture(scope="module")
def recorded(run):
    more = {"max_retries": 1} | RECORDED
    return run("local-chat-completions", "demo_gsm8k", "chat/completions", more, "--apply_chat_template")


@pytest.fixture(scope="module")
def by_chat(recorded):
    return read(recorded)


def scores(samples: list[dict], rule: str) -> dict[str, bool]:
    return {one["doc"]["question"]: bool(one["exact_match"]) for one in samples if one["filter"] == rule}


def texts(samples: list[dict]) -> dict[str, str]:
    return {one["doc"]["question"]: one["resps"][0][0] for one in samples}


def test_lm_evals_gsm8k_scores_as_evals_gsm8k_does(by_chat, evaluated):
    ours = evaluated["no-tools"]
    assert texts(by_chat) == {question: sample["completion"] for question, sample in ours.items()}
    strict, flexible = scores(by_chat, "strict-match"), scores(by_chat, "flexible-extract")
    assert strict == {question: sample["correct_strict"] for question, sample in ours.items()}
    assert flexible == {question: sample["correct_flexible"] for question, sample in ours.items()}
    assert len(set(strict.values())) == 2  # some right, some wrong: the comparison says something


def test_the_rules_of_the_task_are_those_of_lm_evals_own_gsm8k(clients):
    task = yaml.safe_load((TASKS / "demo_gsm8k.yaml").read_text())
    (own,) = (ROOT / ".venv-clients").glob("lib/python3.*/site-packages/lm_eval/tasks/gsm8k/gsm8k.yaml")
    theirs = yaml.safe_load(own.read_text())
    for name in ("metric_list", "filter_list", "output_type"):
        assert task[name] == theirs[name]


def test_completions_of_token_ids_say_what_the_chats_say(run, by_chat):
    samples = run("local-completions", "demo_gsm8k", "completions", LOCAL, "--apply_chat_template")
    assert texts(read(samples)) == texts(by_chat)


def test_the_samples_label_the_runs_that_the_headers_recorded(recorded, by_chat, served):
    table = labelled(recorded, "lm-eval", served.home / "activations")
    strict = {str(one["doc_id"]): bool(one["exact_match"]) for one in by_chat if one["filter"] == "strict-match"}
    rows = table.to_pylist()
    assert len({row["run_id"] for row in rows}) == len(rows) == 20
    assert {row["sample_id"]: row["exact_match,strict-match"] == 1.0 for row in rows} == strict
    assert "exact_match,flexible-extract" in table.column_names
    left = json.loads(table.schema.metadata[b"labels"])["left_out"]
    assert set(left.values()) == {0}


def test_loglikelihoods_are_those_of_transformers(run):
    samples = run("local-completions", "demo_choice", "completions", LOCAL | {"max_retries": 1})
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
    model = AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32)
    samples = read(samples)
    assert len(samples) == 20
    for sample in samples:
        for arguments, response in zip(sample["arguments"].values(), sample["resps"], strict=True):
            context, continuation = arguments["arg_0"], arguments["arg_1"]
            known = len(tokenizer(context)["input_ids"])
            ids = tokenizer(context + continuation, return_tensors="pt")["input_ids"]  # [1, tokens]
            with torch.inference_mode():
                logprobs = model(ids).logits[0, known - 1 : -1].log_softmax(-1)  # [continuation, vocabulary]
            chosen = logprobs.gather(1, ids[0, known:, None])[:, 0]
            total, greedy = response[0]
            assert float(total) == pytest.approx(chosen.sum().item(), abs=1e-3)
            assert str(greedy) == str(bool((logprobs.argmax(-1) == ids[0, known:]).all()))
