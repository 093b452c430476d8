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

ROOT = Path(__file__).parents[2]
TASKS = Path(__file__).parent / "tasks"
LOCAL = f"tokenizer={WEIGHTS},tokenizer_backend=huggingface"


@pytest.fixture(scope="module")
def run(clients, served, tmp_path_factory):
    """Run one task by one model type; gives the logged samples."""

    def evaluate(kind: str, task: str, route: str, more: str, *options: str) -> list[dict]:
        results = tmp_path_factory.mktemp("lm_eval")
        arguments = f"model=vitrine-demo,base_url={served.base_url}/{route},num_concurrent=8,{more}"
        command = ["lm_eval", "--model", kind, "--model_args", arguments, "--tasks", task, "--include_path", str(TASKS)]
        command += ["--limit", "20", "--log_samples", "--output_path", str(results), *options]
        done = subprocess.run(command, cwd=ROOT, env=clients, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        (samples,) = results.rglob("samples_*.jsonl")
        return [json.loads(line) for line in samples.read_text().splitlines()]

    return evaluate


@pytest.fixture(scope="module")
def by_chat(run):
    return run("local-chat-completions", "demo_gsm8k", "chat/completions", "max_retries=1", "--apply_chat_template")


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
    assert texts(samples) == texts(by_chat)


def test_loglikelihoods_are_those_of_transformers(run):
    samples = run("local-completions", "demo_choice", "completions", f"{LOCAL},max_retries=1")
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
    model = AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32)
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
