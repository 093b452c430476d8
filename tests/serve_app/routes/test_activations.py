"""Recording over HTTP: durable when it is answered, exact, and of every token."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deployments.activations import read_run
from deployments.demo_model import PROBLEMS, WEIGHTS

MODEL = "vitrine-demo"
SITES = ["input_layernorm", "post_attention_layernorm"]
QUESTION = json.loads(PROBLEMS.read_text().splitlines()[0])["question"]


def chat(served, question=QUESTION, **fields):
    body = {"model": MODEL, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 24}
    answer = httpx.post(f"{served.base_url}/chat/completions", json=body | fields, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def lone_forward():
    """Both norms' outputs of a plain forward: (token ids) -> {point: [tokens, hidden]}."""
    model = AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32)

    def run(token_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        seen: dict[str, torch.Tensor] = {}
        hooks = [
            getattr(layer, site).register_forward_hook(
                lambda _, args, out, name=f"layers.{i}.{site}.output": seen.update({name: out[0].clone()})
            )
            for i, layer in enumerate(model.model.layers)
            for site in SITES
        ]
        with torch.no_grad():
            model(input_ids=token_ids.long()[None])
        for hook in hooks:
            hook.remove()
        return seen

    return run


def assert_rows_equal(stored: torch.Tensor, plain: torch.Tensor) -> None:
    assert stored.shape == plain.shape
    error = (stored - plain).norm(dim=-1) / plain.norm(dim=-1)
    assert error.max() < 1e-4


def test_fifty_real_problems_at_once_are_all_stored_whole_and_exact(served, gsm8k, lone_forward):
    questions = [json.loads(line)["question"] for line in gsm8k.read_text().splitlines()[:50]]
    fields = {
        "capture": {"layers": [1, 3, 5], "sites": [f"{site}.output" for site in SITES]},
        "session_id": "fifty",
        "max_tokens": 64,
    }
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda question: chat(served, question, **fields), questions))
    for answer in answers:
        meta, usage = answer["activations_meta"], answer["usage"]
        assert meta["status"] == "stored"
        run = meta["runs"][0]
        stored = read_run(run["points"]["layers.1.input_layernorm.output"]["uri"], run_id=run["run_id"])
        assert len(stored) == 6
        assert len(stored.token_ids) == usage["total_tokens"] == run["tokens"]
        plain = lone_forward(torch.as_tensor(stored.token_ids))
        for name, rows in stored.items():
            assert run["points"][name]["shape"] == [usage["total_tokens"], rows.shape[-1]]
            assert_rows_equal(rows, plain[name])


def test_store_activations_alone_records_both_norms_of_three_layers(served):
    answer = chat(served, store_activations=True, session_id="defaults")
    points = answer["activations_meta"]["runs"][0]["points"]
    assert sorted(points) == sorted(f"layers.{i}.{site}.output" for i in (2, 3, 4) for site in SITES)
    message = answer["choices"][0]["message"]
    assert message["session_id"] == "defaults"
    assert message["activation_files"] == {name: point["uri"] for name, point in points.items()}


def test_without_a_session_a_request_joins_the_servers_session_of_the_day(served):
    session = chat(served, store_activations=True)["activations_meta"]["session_id"]
    assert session.startswith("auto-20")
    assert session in [s["id"] for s in httpx.get(f"{served.base_url}/activations/sessions", timeout=60).json()["data"]]


def test_a_stream_ends_with_where_its_activations_lie(served):
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8, "temperature": 0}
    body |= {"stream": True, "store_activations": True}
    lines = httpx.post(f"{served.base_url}/chat/completions", json=body, timeout=60).text.split("\n\n")
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    last = json.loads(events[-2])
    assert last["choices"] == []
    run = last["activations_meta"]["runs"][0]
    uri = run["points"]["layers.2.input_layernorm.output"]["uri"]
    assert len(read_run(uri, run_id=run["run_id"]).token_ids) == run["tokens"]


def test_one_request_makes_a_run_for_every_choice(served):
    fields = {"store_activations": True, "session_id": "many"}
    body = {"model": MODEL, "prompt": ["Tom has 3.", "Ann"], "n": 2, "max_tokens": 4, "seed": 1}
    answer = httpx.post(f"{served.base_url}/completions", json=body | fields, timeout=60).json()
    runs = answer["activations_meta"]["runs"]
    assert [run["index"] for run in runs] == [0, 1, 2, 3]
    assert [choice["run_id"] for choice in answer["choices"]] == [run["run_id"] for run in runs]
    assert len({run["run_id"] for run in runs}) == 4


def test_an_answer_with_ids_alone_names_no_file_and_its_run_is_stored(served):
    answer = chat(served, capture={"points": ["layers.*.output"], "return": "id"}, session_id="ids")
    meta, message = answer["activations_meta"], answer["choices"][0]["message"]
    assert (meta["status"], meta["runs"][0]["points"], message["activation_files"]) == ("stored", {}, {})
    (found,) = httpx.get(f"{served.base_url}/activations/session/ids", timeout=60).json()["runs"]
    assert found["run_id"] == message["run_id"]
    rows = read_run(found["points"]["layers.0.output"]["uri"], message["run_id"])
    assert len(rows["layers.0.output"]) == meta["runs"][0]["tokens"]


def test_inline_values_are_those_that_would_be_stored(served):
    capture = {"points": ["layers.-1.output"], "tokens": {"last": 3}, "features": {"first": 5}}
    stored = chat(served, capture=capture, session_id="inline")["activations_meta"]["runs"][0]
    inline = chat(served, capture=capture | {"return": "inline"})["activations_meta"]
    assert inline["status"] == "inline"
    point = inline["runs"][0]["points"]["layers.5.output"]
    assert (point["format"], point["shape"], point["sample_info"]) == ("sampled_tensor", [3, 5], "first_5_features")
    rows = read_run(stored["points"]["layers.5.output"]["uri"], run_id=stored["run_id"])["layers.5.output"]
    torch.testing.assert_close(torch.tensor(point["data"]), rows, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", ["all", "generated", {"last": 3}])
def test_each_row_says_where_its_token_begins_in_the_text(served, tokens):
    answer = chat(served, "Größe 🙂 plus 3?", capture={"points": ["norm.output"], "tokens": tokens}, session_id="text")
    stored = answer["activations_meta"]["runs"][0]
    run = read_run(stored["points"]["norm.output"]["uri"], run_id=stored["run_id"])
    whole = chat(served, "Größe 🙂 plus 3?", capture={"points": ["norm.output"]}, session_id="text")
    rest = read_run(
        whole["activations_meta"]["runs"][0]["points"]["norm.output"]["uri"],
        run_id=whole["activations_meta"]["runs"][0]["run_id"],
    )
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
    before = [tokenizer.decode(rest.token_ids[:position]).rstrip("\ufffd") for position in run.positions]
    assert run.text_offsets.tolist() == [len(text) for text in before]


def test_a_run_that_has_nothing_to_store_fails_with_the_reason_and_the_answer_comes(served):
    capture = {"points": ["norm.output"], "tokens": "generated", "mode": "trace"}
    meta = chat(served, capture=capture)["activations_meta"]
    assert meta["status"] == "failed"
    assert "generated" in meta["reason"]


def test_what_is_asked_with_a_run_is_stored_with_it(served):
    capture = {"points": ["embed.output"], "tags": {"condition": "control"}, "sample_id": "q7"}
    run = chat(served, capture=capture, session_id="facts", seed=3)["activations_meta"]["runs"][0]
    facts = read_run(run["points"]["embed.output"]["uri"], run_id=run["run_id"]).facts
    assert (facts.tags, facts.sample_id, facts.model) == ({"condition": "control"}, "q7", MODEL)
    assert facts.sampling["seed"] == 3


def test_sessions_are_listed_shown_and_deleted_with_their_files(served):
    chat(served, store_activations=True, session_id="short-lived")
    url = f"{served.base_url}/activations/session/short-lived"
    shown = httpx.get(url, timeout=60).json()
    assert [run["tokens"] for run in shown["runs"]]
    files = [Path(urlsplit(file["uri"]).path) for file in shown["files"]]
    assert files
    assert all(file.exists() for file in files)
    assert httpx.delete(url, timeout=60).json() == {"id": "short-lived", "object": "session", "deleted": True}
    assert not any(file.exists() for file in files)
    assert httpx.get(url, timeout=60).status_code == 404


def test_a_page_of_a_session_has_the_files_of_its_runs(served):
    for point in ("embed.output", "norm.output"):  # each in a file of its own
        chat(served, capture={"points": [point]}, session_id="two-files", max_tokens=1)
    url = f"{served.base_url}/activations/session/two-files"
    whole = httpx.get(url, timeout=60).json()
    assert len(whole["files"]) == 2
    after, listed = None, []
    for more in (True, False):
        page = httpx.get(url, params={"limit": 1} | ({"after": after} if after else {}), timeout=60).json()
        assert page["has_more"] is more
        [run], after = page["runs"], page["runs"][0]["run_id"]
        assert [file["uri"] for file in page["files"]] == [point["uri"] for point in run["points"].values()]
        listed += page["files"]
    assert sorted(listed, key=lambda file: file["uri"]) == whole["files"]
    httpx.delete(url, timeout=60)


@pytest.fixture(scope="module")
def experiment(served):
    """The ids of three runs in two sessions, the oldest first: of the samples q1 to q3, the last one a treatment's."""
    asked = [("filters-a", "q1", "control"), ("filters-a", "q2", "control"), ("filters-b", "q3", "treatment")]
    found = []
    for session_id, sample_id, condition in asked:
        tags = {"condition": condition, "study": "a=b & c"}
        capture = {"points": ["embed.output"], "tags": tags, "sample_id": sample_id}
        answer = chat(served, capture=capture, session_id=session_id, max_tokens=1)
        found.append(answer["activations_meta"]["runs"][0]["run_id"])
    return found


def get(served, path, **params):
    return httpx.get(f"{served.base_url}/activations/{path}", params=params, timeout=60)


STUDY = "study=a=b & c"


def test_runs_are_found_by_session_model_time_sample_and_tags(served, experiment):
    def found(**params) -> list[str]:
        answer = get(served, "runs", **{"tag": STUDY} | params)
        assert answer.status_code == 200, answer.text
        return [run["run_id"] for run in answer.json()["data"]]

    assert found() == experiment
    assert found(session="filters-a") == experiment[:2]
    assert found(sample_id="q2") == experiment[1:2]
    assert found(tag=[STUDY, "condition=treatment"]) == experiment[2:]
    assert found(model=MODEL) == experiment
    assert found(model="other") == found(session="none-such") == found(tag="study=other") == []
    created = [run["created"] for run in get(served, "runs", tag=STUDY).json()["data"]]
    assert found(since=created[1]) == experiment[1:]
    assert found(since=created[0], until=created[2]) == experiment[:2]


def test_runs_come_in_pages_and_say_where_they_lie(served, experiment):
    first = get(served, "runs", tag=STUDY, limit=2).json()
    assert (first["object"], first["has_more"]) == ("list", True)
    rest = get(served, "runs", tag=STUDY, limit=2, after=experiment[1]).json()
    assert not rest["has_more"]
    assert [run["run_id"] for run in first["data"] + rest["data"]] == experiment
    run = first["data"][1]
    assert (run["session_id"], run["sample_id"], run["tags"]["condition"]) == ("filters-a", "q2", "control")
    point = run["points"]["embed.output"]
    assert len(read_run(point["uri"], run["run_id"], offset=run["offset"])["embed.output"]) == point["shape"][0]


def test_of_sessions_the_runs_that_fit_are_counted(served, experiment):
    listed = get(served, "sessions", tag=[STUDY, "condition=control"]).json()["data"]
    assert [(one["id"], one["runs"], one["models"]) for one in listed] == [("filters-a", 2, [MODEL])]
    listed = get(served, "sessions", sample_id="q2").json()["data"]
    assert [(one["id"], one["runs"]) for one in listed] == [("filters-a", 1)]


@pytest.mark.parametrize(
    ("path", "params", "param"),
    [
        ("runs", {"tag": "condition"}, "tag"),
        ("sessions", {"tag": "=x"}, "tag"),
        ("runs", {"since": "yesterday"}, "since"),
        ("sessions", {"until": "nan"}, "until"),
        ("runs", {"limit": 1001}, "limit"),
        ("runs", {"limit": 0}, "limit"),
        ("runs", {"after": "none-such"}, "after"),
        ("runs", {"session": ".hidden"}, "session"),
        ("session/filters-a", {"limit": 0}, "limit"),
        ("session/filters-a", {"after": "none-such"}, "after"),
    ],
)
def test_a_bad_filter_or_page_is_refused_by_its_parameter(served, experiment, path, params, param):
    answer = get(served, path, **params)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
