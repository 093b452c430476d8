"""lm_eval by the commands of docs/quickstart.md, against the served model, through tasks of local problems."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from deployments.demo_model import WEIGHTS
from evals.labels.lm_eval import labelled

# In the environment of the clients; tests/evals/labels and tests/serve_app/test_scoring.py claim most of it.
pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
TASKS = Path(__file__).parent / "tasks"
DOCUMENT = (ROOT / "docs" / "quickstart.md").read_text().replace("\\\n", "")
DOCUMENT = DOCUMENT.replace("$HOME/.vitrine/models/smollm2", "deployments/demo_model/weights")
DOCUMENT = DOCUMENT.replace("smollm2", "vitrine-demo")
CHATS, COMPLETIONS = map(shlex.split, re.findall(r"^lm_eval [^`]*", DOCUMENT, re.MULTILINE))
ADDRESS = "http://127.0.0.1:8000"
# lm_eval reads the 13,000 files of its own tasks at each start, for 12 seconds of processor time.
LOCAL_TASKS = """
import functools
from lm_eval.tasks.manager import TaskManager
TaskManager.__init__ = functools.partialmethod(TaskManager.__init__, include_defaults=False)
"""
FIELDS = {"session_id": "lm-eval", "capture": {"tags": {"task": "demo_gsm8k"}}}
RECORDED = {"header": {"X-Vitrine-Body": json.dumps(FIELDS)}}


@pytest.fixture(scope="module")
def run(run_command, served, tmp_path_factory):
    """Run a command of the page; gives the file of the logged samples."""

    def evaluate(command: list[str]) -> Path:
        results = tmp_path_factory.mktemp("lm_eval")
        here = [word.replace(ADDRESS, served.root) for word in command]
        run_command("run_module", *here, "--log_samples", "--output_path", results, first=LOCAL_TASKS)
        (samples,) = results.rglob("samples_*.jsonl")
        return samples

    return evaluate


def read(samples: Path) -> list[dict]:
    return [json.loads(line) for line in samples.read_text().splitlines()]


@pytest.fixture(scope="module")
def recorded(run):
    place = CHATS.index("--model_args") + 1
    arguments = dict(pair.split("=", 1) for pair in CHATS[place].split(","))
    with_headers = json.dumps(arguments | {"num_concurrent": int(arguments["num_concurrent"])} | RECORDED)
    return run([*CHATS[:place], with_headers, *CHATS[place + 1 :]])


@pytest.fixture(scope="module")
def by_chat(recorded):
    return read(recorded)


def scores(samples: list[dict], rule: str) -> dict[str, bool]:
    return {one["doc"]["question"]: bool(one["exact_match"]) for one in samples if one["filter"] == rule}


def texts(samples: list[dict]) -> dict[str, str]:
    return {one["doc"]["question"]: one["resps"][0][0] for one in samples}


def test_lm_evals_gsm8k_scores_as_evals_gsm8k_does(by_chat, evaluated):
    assert texts(by_chat) == {question: sample["completion"] for question, sample in evaluated.items()}
    strict, flexible = scores(by_chat, "strict-match"), scores(by_chat, "flexible-extract")
    assert strict == {question: sample["correct_strict"] for question, sample in evaluated.items()}
    assert flexible == {question: sample["correct_flexible"] for question, sample in evaluated.items()}
    assert len(set(strict.values())) == 2  # some right, some wrong: the comparison says something


def test_the_rules_of_the_task_are_those_of_lm_evals_own_gsm8k(clients):
    task = yaml.safe_load((TASKS / "demo_gsm8k.yaml").read_text())
    (own,) = (ROOT / ".venv-clients").glob("lib/python3.*/site-packages/lm_eval/tasks/gsm8k/gsm8k.yaml")
    theirs = yaml.safe_load(own.read_text())
    for name in ("metric_list", "filter_list", "output_type"):
        assert task[name] == theirs[name]


def test_completions_of_token_ids_say_what_the_chats_say(run, by_chat):
    assert texts(read(run(COMPLETIONS))) == texts(by_chat)


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
    words = [word.replace("demo_gsm8k", "demo_choice") for word in COMPLETIONS if word != "--apply_chat_template"]
    samples = run(words)
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
