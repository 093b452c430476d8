"""Owners over HTTP: data of one key is not read, used, filled, changed or evicted by another key."""

from __future__ import annotations

import json
import os
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime

import httpx
import pytest
import ray
import torch
import websocket
from safetensors.torch import save

from deployments.activations.actors.store import connect
from deployments.activations.index.index import Index
from deployments.activations.limits import Retention
from tests.serve_app.keyed import OWNERS

POINT = "layers.3.output"
BODY = {"model": "vitrine-demo", "prompt": "Tom has 3 boxes of 4 pens.", "max_tokens": 4, "temperature": 0}
CAPTURE = {"points": [POINT]}
DAMP = [{"op": "scale", "point": POINT, "factor": 0.5}]
VECTOR = save({"v": torch.linspace(-5, 5, 192)})
BYTES = {"content-type": "application/octet-stream"}
SESSIONS, SESSION = "/v1/activations/sessions", "/v1/activations/session/"
MODEL_KEY = 'nnsight.modeling.transformers.TransformersModel:{"repo_id": "vitrine-demo", "revision": null}'


@pytest.fixture(scope="module")
def ask(keyed):
    """`ask(name, method, path, **request)`: the answer to one of the owners."""

    def ask(name, method, path, headers=None, **request):
        headers = (headers or {}) | {"Authorization": f"Bearer {OWNERS[name]}"}
        return httpx.request(method, keyed + path, headers=headers, timeout=120, **request)

    return ask


@pytest.fixture(scope="module")
def record(ask):
    """`record(name, session, **fields)`: the answer to a request that records."""

    def record(name, session=None, **fields):
        body = BODY | {"capture": CAPTURE, "session_id": session} | fields
        return ask(name, "POST", "/v1/completions", json=body)

    return record


@pytest.fixture(scope="module")
def complete(ask):
    return lambda name, **fields: ask(name, "POST", "/v1/completions", json=BODY | fields)


@pytest.fixture(scope="module")
def mine(record):
    """A run of a session of alice's."""
    meta = record("alice", "mine").json()["activations_meta"]
    assert meta["status"] == "stored"
    return meta["runs"][0]["run_id"]


@pytest.fixture
def limited(served):
    """`with limited(**limits)`: the store keeps to them in the block."""
    store = connect(str(served.home / "activations"))

    @contextmanager
    def limited(**limits):
        ray.get(store.retain.remote(Retention(**limits)))
        try:
            yield
        finally:
            ray.get(store.retain.remote(Retention()))

    return limited


def code(answer):
    return answer.status_code, answer.json()["error"]["code"]


def listed(ask, name, path=SESSIONS, key="id"):
    """The ids of all that the key `name` is told of, page after page."""
    found, more = [], True
    while more:
        after = {"after": found[-1]} if found else {}
        page = ask(name, "GET", path, params=httpx.URL(path).params.merge({"limit": 1000} | after)).json()
        found += [one[key] for one in page["data"]]
        more = page["has_more"]
    return set(found)


@pytest.mark.parametrize(
    ("method", "rest", "missing"),
    [
        ("GET", "", "session_not_found"),
        ("GET", "/files/x.arrow", "file_not_found"),
        ("DELETE", "", "session_not_found"),
        ("PUT", "/pin", "session_not_found"),
        ("DELETE", "/pin", "session_not_found"),
    ],
)
@pytest.mark.parametrize("query", ["", "?owner=alice"])
def test_a_session_of_another_key_is_as_if_it_did_not_exist(ask, mine, method, rest, missing, query):
    answers = [ask("bob", method, f"{SESSION}{session}{rest}{query}") for session in ("mine", "none")]
    assert [code(answer) for answer in answers] == [(404, missing)] * 2
    assert answers[0].text == answers[1].text.replace("none", "mine")
    assert ask("alice", "GET", f"{SESSION}mine").json()["owner"] == "alice"


def test_bytes_of_a_file_are_its_owners(ask, mine):
    (run,) = [run for run in ask("alice", "GET", f"{SESSION}mine").json()["runs"] if run["run_id"] == mine]
    path, part = f"{SESSION}mine/files/{run['file']}", {"Range": f"bytes=0-{run['bytes'] - 1}"}
    assert code(ask("bob", "GET", path, headers=part)) == (404, "file_not_found")
    answers = [ask("alice", "GET", path, headers=part), ask("root", "GET", f"{path}?owner=alice", headers=part)]
    assert [answer.status_code for answer in answers] == [206, 206]
    assert answers[0].content == answers[1].content
    assert len(answers[0].content) == run["bytes"]


def test_lists_hold_ones_own_sessions_and_runs_alone(ask, record, mine):
    run = record("bob", "bobs").json()["activations_meta"]["runs"][0]["run_id"]
    assert "mine" in listed(ask, "alice")
    assert "bobs" in listed(ask, "bob")
    assert not {"mine"} & listed(ask, "bob")
    assert mine not in listed(ask, "bob", "/v1/activations/runs", "run_id")
    assert listed(ask, "bob", "/v1/activations/runs?session=mine", "run_id") == set()
    for path in ("/v1/activations/runs", "/v1/activations/runs?session=mine"):
        answers = [ask("bob", "GET", path, params={"after": after}) for after in (mine, "none")]
        assert [code(answer) for answer in answers] == [(400, "run_not_found")] * 2
    assert {"mine", "bobs"} <= listed(ask, "root")
    assert {mine, run} <= listed(ask, "root", "/v1/activations/runs", "run_id")


def test_sessions_of_two_keys_may_have_one_name(ask, record):
    runs = {name: record(name, "both").json()["activations_meta"]["runs"][0]["run_id"] for name in ("alice", "bob")}
    for name, run in runs.items():
        shown = ask(name, "GET", f"{SESSION}both").json()
        assert ([one["run_id"] for one in shown["runs"]], shown["owner"]) == ([run], name)
        assert ask("root", "GET", f"{SESSION}both?owner={name}").json()["runs"] == shown["runs"]
    for method, rest in (("GET", ""), ("DELETE", ""), ("PUT", "/pin")):
        answer = ask("root", method, f"{SESSION}both{rest}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (409, "owner")
    both = [one for one in ask("root", "GET", f"{SESSIONS}?after=bot").json()["data"] if one["id"] == "both"]
    assert [one["owner"] for one in both] == ["alice", "bob"]
    following = ask("root", "GET", f"{SESSIONS}?after=both@alice&limit=1").json()["data"]
    assert [(one["id"], one["owner"]) for one in following] == [("both", "bob")]
    assert ask("root", "DELETE", f"{SESSION}both?owner=alice").json()["deleted"]
    assert code(ask("alice", "GET", f"{SESSION}both"))[0] == 404
    assert ask("bob", "GET", f"{SESSION}both").status_code == 200


def test_nobody_reads_a_run_of_another_key_by_putting_its_rows_in_the_place_of_others(complete, mine):
    def patched(name, run):
        source = {"run_id": run, "tokens": "prompt_last"}
        return complete(
            name, interventions=[{"op": "replace", "point": POINT, "from": source, "tokens": "prompt_last"}]
        )

    answers = [patched("bob", run) for run in (mine, "none")]
    assert [code(answer) for answer in answers] == [(400, "run_not_found")] * 2
    assert answers[0].text == answers[1].text.replace("none", mine)
    assert patched("alice", mine).status_code == patched("root", mine).status_code == 200


def test_nobody_reads_uses_or_deletes_a_tensor_file_of_another_key(ask, complete):
    kept = {
        name: ask(name, "POST", "/v1/tensors", content=VECTOR, headers=BYTES).json()["id"] for name in ("alice", "root")
    }
    assert kept["alice"] != kept["root"]
    for file in kept.values():
        assert file not in listed(ask, "bob", "/v1/tensors")
        assert code(ask("bob", "GET", f"/v1/tensors/{file}")) == (404, "tensor_not_found")
        assert code(ask("bob", "DELETE", f"/v1/tensors/{file}")) == (404, "tensor_not_found")
        steer = [{"op": "add", "point": POINT, "vector": file}]
        assert code(complete("bob", interventions=steer)) == (400, "tensor_not_found")
        preset = {"name": "theirs", "model": "vitrine-demo", "interventions": steer}
        assert ask("bob", "POST", "/v1/interventions", json=preset).json()["error"]["code"] == "tensor_not_found"
    steer = [{"op": "add", "point": POINT, "vector": kept["alice"]}]
    assert complete("alice", interventions=steer).status_code == 200
    assert code(complete("root", interventions=steer)) == (400, "tensor_not_found")
    assert code(ask("root", "GET", f"/v1/tensors/{kept['alice']}")) == (404, "tensor_not_found")
    assert ask("root", "GET", f"/v1/tensors/{kept['alice']}?owner=alice").content == VECTOR
    assert code(ask("bob", "GET", f"/v1/tensors/{kept['alice']}?owner=alice")) == (404, "tensor_not_found")
    assert ask("alice", "DELETE", f"/v1/tensors/{kept['alice']}").status_code == 200


def test_a_preset_of_ones_own_changes_nobody_elses_of_its_name(ask, complete):
    def keep(name, **fields):
        preset = {"name": "calm", "interventions": [{"op": "scale", "point": POINT, **fields}]}
        assert ask(name, "POST", "/v1/interventions", json=preset).json()["owner"] == name

    keep("alice", factor=1)
    keep("bob", factor=-3)
    factors = {
        name: ask(name, "GET", "/v1/interventions/calm").json()["interventions"][0]["factor"]
        for name in ("alice", "bob")
    }
    assert factors == {"alice": 1, "bob": -3}
    texts = {name: complete(name, preset="calm").json()["choices"][0]["text"] for name in factors}
    assert texts["alice"] == complete("alice").json()["choices"][0]["text"] != texts["bob"]
    assert code(ask("hog", "GET", "/v1/interventions/calm")) == (404, "preset_not_found")
    assert code(complete("hog", preset="calm")) == (400, "preset_not_found")
    for owner in ("alice", "none"):
        assert code(ask("bob", "GET", f"/v1/interventions/calm?owner={owner}")) == (404, "preset_not_found")
        assert code(ask("bob", "DELETE", f"/v1/interventions/calm?owner={owner}")) == (404, "preset_not_found")
    assert ask("bob", "DELETE", "/v1/interventions/calm").status_code == 200
    found = [one for one in ask("root", "GET", "/v1/interventions").json()["data"] if one["name"] == "calm"]
    assert [one["owner"] for one in found] == ["alice"]
    assert ask("root", "DELETE", "/v1/interventions/calm?owner=alice").status_code == 200


def test_an_admins_default_holds_for_everybody_with_tensors_and_readouts_that_nobody_else_may_read(ask, complete):
    file = ask("root", "POST", "/v1/tensors", content=VECTOR, headers=BYTES).json()["id"]
    spec = {"name": "calmness", "model": "vitrine-demo", "point": POINT, "kind": "linear"}
    form = {"files": {"file": save({"weight": torch.ones(1, 192)})}, "data": {"spec": json.dumps(spec)}}
    assert ask("root", "POST", "/v1/readouts", **form).status_code == 200
    when = {"readout": "calmness", "above": -1e9}
    steer = [{"op": "add", "point": POINT, "vector": file}]
    preset = {"name": "house", "model": "vitrine-demo", "default": True, "readouts": ["calmness"]}
    preset["interventions"] = [steer[0] | {"when": when}]
    plain = complete("bob").json()["choices"][0]["text"]
    assert (
        code(ask("bob", "POST", "/v1/interventions", json=preset | {"interventions": DAMP, "readouts": []}))[0] == 403
    )
    assert ask("root", "POST", "/v1/interventions", json=preset).status_code == 200
    try:
        for fields in ({}, {"preset": "house"}):
            (choice,) = complete("bob", **fields).json()["choices"]
            assert choice["text"] != plain
            assert choice["readouts"]["calmness"]["generated"]["values"]
        assert ask("bob", "GET", "/v1/interventions/house").json()["default"]
        assert code(ask("bob", "DELETE", "/v1/interventions/house")) == (404, "preset_not_found")
        both = complete("bob", interventions=steer)
        assert code(both) == (400, "tensor_not_found")
        assert both.json()["error"]["param"] == "interventions[0].vector"
        own = complete("bob", readouts=["calmness"])  # a name of bob's, which he has none of
        assert code(own)[0] == 400
        # The default's names stay its owner's when another key takes one that is free.
        assert ask("root", "DELETE", "/v1/readouts/calmness").status_code == 200
        assert ask("bob", "POST", "/v1/readouts", **form).status_code == 200
        assert code(complete("hog")) == (400, "readout_not_found")
        assert code(ask("root", "DELETE", "/v1/readouts/calmness")) == (404, "readout_not_found")
        assert ask("root", "DELETE", "/v1/readouts/calmness?owner=bob").status_code == 200
    finally:
        assert ask("root", "DELETE", "/v1/interventions/house").status_code == 200


def test_an_owner_pins_and_deletes_and_so_does_an_admin(ask, record):
    record("alice", "whole")
    assert ask("alice", "PUT", f"{SESSION}whole/pin").json()["pinned"]
    assert code(ask("alice", "DELETE", f"{SESSION}whole")) == (409, "session_pinned")
    assert code(ask("bob", "DELETE", f"{SESSION}whole")) == (404, "session_not_found")
    assert ask("root", "DELETE", f"{SESSION}whole/pin").json()["pinned"] is False
    assert ask("root", "DELETE", f"{SESSION}whole").json()["deleted"]
    assert code(ask("alice", "GET", f"{SESSION}whole"))[0] == 404


def test_each_key_has_an_automatic_session_of_its_own(ask, record):
    runs = {name: record(name).json()["activations_meta"] for name in ("alice", "bob")}
    for name, meta in runs.items():
        assert meta["session_id"].startswith("auto-20")
        shown = [run["run_id"] for run in ask(name, "GET", f"{SESSION}{meta['session_id']}").json()["runs"]]
        assert meta["runs"][0]["run_id"] in shown
        assert not {other["runs"][0]["run_id"] for other in runs.values() if other is not meta} & set(shown)


def test_what_was_recorded_without_keys_is_admins(ask, record, served):
    body = BODY | {"capture": CAPTURE, "session_id": "before-keys"}
    answer = httpx.post(f"{served.base_url}/completions", json=body, timeout=60).json()
    assert answer["activations_meta"]["status"] == "stored"
    assert "owner" not in httpx.get(f"{served.root}{SESSION}before-keys", timeout=60).json()
    assert code(ask("bob", "GET", f"{SESSION}before-keys"))[0] == 404
    assert "before-keys" not in listed(ask, "bob")
    for query in ("", "?owner="):
        assert ask("root", "GET", f"{SESSION}before-keys{query}").json()["owner"] is None
    assert ask("root", "DELETE", f"{SESSION}before-keys").status_code == 200


def test_the_files_say_whose_they_are(ask, record, served, mine):
    record("bob", "bobs-own")
    with closing(Index.scanned(served.home / "activations")) as index:
        found = {(one["id"], one["owner"]) for one in index.sessions(100_000)}
    told = ask("root", "GET", f"{SESSIONS}?limit=1000").json()["data"]
    assert {("mine", "alice"), ("bobs-own", "bob")} <= found
    assert {(one["id"], one["owner"]) for one in told} <= found


def test_who_fills_the_store_evicts_nobody_elses_sessions(ask, record, limited, mine, served):
    for session in ("hog-2", "hog-3"):
        record("hog", session)
    total = sum(one["bytes"] for one in ask("root", "GET", f"{SESSIONS}?limit=1000").json()["data"])
    before = listed(ask, "root")
    with limited(max_store_bytes=total + 100, delete_oldest=True):
        for number in range(8):
            assert record("hog", f"hog-more-{number}").json()["activations_meta"]["status"] == "stored"
    gone = before - listed(ask, "root")
    assert gone
    assert all(session.startswith("hog") for session in gone)
    assert mine in listed(ask, "alice", "/v1/activations/runs", "run_id")


def test_tokens_are_counted_for_their_owner_and_admins_and_survive_the_store(ask, complete, served, eventually):
    def used(name, **period):
        data = ask(name, "GET", "/v1/usage", params=period).raise_for_status().json()["data"]
        return next((entry for entry in data if entry["owner"] == "meter"), None)

    assert used("meter") == {"owner": "meter", "requests": 0, "prompt_tokens": 0, "completion_tokens": 0}
    usage = complete("meter", n=2).json()["usage"]
    expected = {"owner": "meter", "requests": 1} | {
        name: usage[name] for name in ("prompt_tokens", "completion_tokens")
    }
    eventually(lambda: used("meter"), lambda now: now == expected)
    store = connect(str(served.home / "activations"))

    def process():
        with suppress(ray.exceptions.RayActorError):  # until it is up again
            return ray.get(store.__ray_call__.remote(lambda _: os.getpid()))

    before = process()
    ray.kill(store, no_restart=False)  # returns before the process has ended
    eventually(process, lambda now: now not in (None, before))
    assert used("root") == used("meter", period=f"{datetime.now(UTC):%Y-%m}") == expected
    assert used("bob") is None
    assert used("meter", period="1999")["requests"] == 0
    assert ask("meter", "GET", "/v1/usage", params={"period": "today"}).status_code == 400


def test_who_leaves_before_the_end_is_charged_for_what_ran(ask, keyed, eventually):
    def used():
        return ask("gone", "GET", "/v1/usage").raise_for_status().json()["data"][0]

    header = {"Authorization": f"Bearer {OWNERS['gone']}"}
    prompt = len(ask("gone", "POST", "/tokenize", json={"prompt": BODY["prompt"]}).json()["tokens"])
    body = BODY | {"max_tokens": 3000, "ignore_eos": True}
    with httpx.stream("POST", f"{keyed}/v1/completions", json=body | {"stream": True}, headers=header) as answer:
        lines = answer.iter_lines()
        for _ in range(20):
            next(lines)
    eventually(used, lambda now: now["prompt_tokens"] == prompt and now["completion_tokens"] >= 9)
    before = used()["completion_tokens"]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{keyed}/v1/completions", json=body, headers=header, timeout=0.5)
    eventually(used, lambda now: now["prompt_tokens"] == 2 * prompt and now["completion_tokens"] > before)
    targets = {"prompt": BODY["prompt"], "targets": [5]}
    assert ask("gone", "POST", "/v1/model/attribution", json=targets).status_code == 200
    eventually(used, lambda now: (now["prompt_tokens"], now["requests"]) == (3 * prompt, 3))


def test_nobody_hears_of_a_job_of_another_key(ask, keyed):
    def sent(name, listener=""):
        data = json.dumps({"model_key": MODEL_KEY, "session_id": listener})
        headers = {"nnsight-version": "0.8.1"}
        return ask(name, "POST", "/request", data={"data": data}, files={"blob": b"none"}, headers=headers)

    job = sent("alice").json()["id"]
    assert ask("alice", "GET", f"/response/{job}").json()["id"] == job
    assert ask("root", "GET", f"/response/{job}").status_code == 200
    answers = [ask("bob", "GET", f"/response/{one}") for one in (job, "0" * 32)]
    assert [code(answer) for answer in answers] == [(410, "job_not_found")] * 2
    header = {"Authorization": f"Bearer {OWNERS['alice']}"}
    with closing(websocket.create_connection(f"ws{keyed[4:]}/subscribe", header=header)) as socket:
        listener = json.loads(socket.recv())["session_id"]
        assert code(sent("bob", listener)) == (404, "session_not_found")
        assert sent("alice", listener).status_code == 200
