"""Tokens by role over HTTP: recorded, changed, read again from the stored run, and refused by field."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from deployments.activations import read_run
from deployments.activations.reader.row_index import index_rows
from deployments.activations.reader.tables import table
from tests.serve_app.completions import MODEL, POINT, PROMPT, post, refused
from vitrine.runs.rows import of_files

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Tom has 3 boxes."},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": PROMPT},
]
SOME = [{"role": "user"}, {"role": "assistant"}, {"turn": 2}, {"turn": -1}, {"role": "user", "turn": -1}, "answer"]


def ask(served, **fields):
    body = {"model": MODEL, "messages": CHAT, "max_tokens": 8, "temperature": 0, "ignore_eos": True} | fields
    answer = httpx.post(f"{served.base_url}/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def recorded(served, tokens):
    (run,) = ask(served, capture={"points": [POINT], "tokens": tokens})["activations_meta"]["runs"]
    return Path(urlsplit(run["points"][POINT]["uri"]).path), run["run_id"]


def test_a_stored_run_has_roles_by_which_its_tokens_are_chosen(served, tokenizer):
    file, id = recorded(served, "all")
    run, texts = read_run(file, run_id=id), dict[str, str]()
    for token, role in zip(run.token_ids.tolist(), run.roles, strict=True):
        texts[role] = texts.get(role, "") + tokenizer.decode([token])
    assert texts["system"] == "Be brief."
    assert texts["user"] == f"Tom has 3 boxes.{PROMPT}"
    assert texts["assistant"].startswith("Yes.")
    assert texts["template"].startswith("<|im_start|>system\n<|im_end|>\n<|im_start|>user")
    prompt, positions = run.facts.prompt_tokens, dict[str, list[int]]()
    for tokens in SOME:
        other = read_run(*recorded(served, tokens))
        positions[str(tokens)] = other.positions.tolist()
        assert len(index_rows(file, [POINT], runs=[id], tokens=tokens)) == len(other.positions)
        assert (other[POINT] - run[POINT][other.positions]).abs().max() < 1e-4
    own = [i for i, role in enumerate(run.roles) if role == "assistant"]
    assert positions[str(SOME[1])] == positions["answer"] == own
    assert positions[str(SOME[2])] + positions[str(SOME[3])] == own
    assert positions[str(SOME[3])] == [*range(prompt, len(run.positions))]
    assert tokenizer.decode(run.token_ids[positions[str(SOME[4])]]) == PROMPT
    assert table(file, ["role"], runs=[id])["role"].to_pylist() == run.roles
    assert next(of_files(file, {id})).roles == run.roles


def test_changes_and_the_lens_are_of_a_role_too(served):
    plain, (file, id) = ask(served), recorded(served, "all")
    row = {"op": "replace", "point": POINT, "tokens": {"role": "user"}}
    same = ask(served, interventions=[row | {"from": {"run_id": id, "tokens": {"role": "user"}}}], report=True)
    assert same["choices"][0]["message"]["content"] == plain["choices"][0]["message"]["content"]
    zero = {"op": "zero", "point": POINT, "tokens": {"role": "system"}}
    (report,) = ask(served, interventions=[zero], report=True)["choices"][0]["report"]
    assert report["rows"] == read_run(file, run_id=id).roles.count("system")
    seen = ask(served, logit_lens={"layers": [3], "tokens": {"role": "assistant"}})["choices"][0]["logit_lens"]
    assert "".join(entry["token"] for entry in seen["prompt"]) == "Yes."
    assert len(seen["content"]) == 8


@pytest.mark.parametrize("tokens", [{"role": "tool"}, {"turn": 9}, {"role": "user", "turn": -3}])
def test_what_a_chat_does_not_have_is_refused(served, tokens):
    answer = post(served, "chat/completions", capture={"points": [POINT], "tokens": tokens})
    assert refused(answer) == (400, "capture.tokens", "no_such_tokens")


def test_a_completion_has_no_roles_but_an_answer(served):
    for field in ({"tokens": {"role": "user"}}, {"tokens": "reasoning"}):
        answer = post(served, capture={"points": [POINT]} | field)
        assert refused(answer) == (400, "capture.tokens", "unknown_roles")
    run = post(served, capture={"points": [POINT], "tokens": "answer"}).json()["activations_meta"]["runs"][0]
    stored = read_run(run["points"][POINT]["uri"], run_id=run["run_id"])
    assert stored.phases == ["generated"] * 8
    assert stored.roles is None
