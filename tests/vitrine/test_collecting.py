"""Activations of many prompts, against what single requests give."""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest

import vitrine
from vitrine.connection.transport import Transport
from vitrine.experiments import collecting, prompt_batches
from vitrine.runs.fetching import COLLECTED

TEXTS = [f"{name} has {'3 boxes of ' * (n % 5)}{n} pens" for n, name in enumerate(["Ann", "Tom", "Eva"] * 4)]
CHATS = [[{"role": "user", "content": text}] for text in TEXTS[:3]]


@pytest.fixture
def small_requests(monkeypatch):
    monkeypatch.setattr(prompt_batches, "PROMPTS_PER_REQUEST", 4)


@pytest.mark.usefixtures("small_requests")
def test_rows_come_in_the_order_of_the_prompts(server):
    labels = [text.split()[0] for text in TEXTS]
    acts = server.collect(TEXTS, ["layers.*.output", "norm.output"], labels=labels, tags={"of": "a test"})
    assert acts.values.shape == (len(TEXTS), 7, 192)
    assert acts.layers == [0, 1, 2, 3, 4, 5, None]
    assert list(acts.labels) == labels
    for text, label, run in zip(TEXTS, labels, server.load_runs(acts.run_ids), strict=True):
        assert run.facts["text"].startswith(text)
        assert run.facts["tags"].items() >= {"of": "a test", "label": label}.items()
    for place in (0, 5, 11):
        alone = server.collect(TEXTS[place : place + 1], acts.points)
        np.testing.assert_allclose(alone.values[0], acts.values[place], rtol=1e-4, atol=1e-4)


def test_all_runs_are_in_one_session_by_their_places(server):
    acts = server.collect(["b", "a"], "layers.0.output", tags=[{"n": "1"}, {"n": "2"}], store_text=False)
    runs = server.load_runs(acts.session)
    assert sorted((run.facts["sample_id"], run.facts["tags"]["n"], run.run_id) for run in runs) == [
        ("0", "1", acts.run_ids[0]),
        ("1", "2", acts.run_ids[1]),
    ]
    assert runs[0].facts["text"] is None


def test_points_come_in_the_order_in_which_they_were_asked_for(server):
    asked = ["layers.-1.output", "norm.output", "layers.1.input_layernorm.output", "blocks.2.hook_resid_post"]
    acts = server.collect(["Ann"], asked, session="client-order", labels=[1])
    assert acts.points == ["layers.5.output", "norm.output", "layers.1.input_layernorm.output", "layers.2.output"]
    (run,) = server.load_runs("client-order")
    for place, point in enumerate(acts.points):
        np.testing.assert_array_equal(acts.values[0, place], run[point][0])
    assert (
        server.activations("client-order", asked).points
        == list(vitrine.load("client-order", asked, server=server))
        == acts.points
    )


def test_the_same_call_again_loads_what_the_session_has(server):
    asked = {"session": "client-again", "labels": [1, 0, 1], "tags": {"of": "a test"}}
    first = server.collect(TEXTS[:3], "resid_post", **asked)
    for points in ("resid_post", "layers.*.output"):
        again = server.collect(TEXTS[:3], points, **asked)
        assert again.run_ids == first.run_ids
        np.testing.assert_array_equal(again.values, first.values)
    asked["labels"] = [1, 0, 1, 0]
    more = server.collect([*TEXTS[:3], CHATS[0]], "resid_post", **asked)
    assert more.run_ids[:3] == first.run_ids
    server.collect(TEXTS[:3], "resid_post", tokens="all", **asked | {"labels": [1, 0, 1]})
    assert len(server.load_runs("client-again")) == 7


@pytest.mark.parametrize("kept", [0, 2, 4])
@pytest.mark.parametrize("status", [0, 503])
@pytest.mark.usefixtures("small_requests")
def test_no_run_is_stored_twice_where_an_answer_is_lost(server, monkeypatch, kept, status):
    exchange, lost = Transport._exchange, []

    async def fail_once(self, method, path, **request):
        if method != "POST" or lost:
            return await exchange(self, method, path, **request)
        lost.append(path)
        body = json.loads(request["content"])
        body["prompt"] = body["prompt"][:kept]
        body["capture"] |= {name: body["capture"][name][:kept] for name in ("tags", "sample_id")}
        if kept:
            await exchange(self, method, path, **request | {"content": json.dumps(body)})
        if not status:
            raise httpx.ReadError("lost")
        error = {"error": {"message": "no replica", "param": None, "code": "unavailable"}}
        return httpx.Response(status, json=error, request=httpx.Request(method, "http://server"))

    monkeypatch.setattr(Transport, "_exchange", fail_once)
    monkeypatch.setattr(collecting, "pause_s", lambda attempt: 0.0)
    acts = server.collect(TEXTS, "layers.1.output", session=f"client-lost-{kept}-{status}")
    assert lost
    runs = server.load_runs(acts.run_ids)
    assert [run.facts["sample_id"] for run in runs] == [*map(str, range(len(TEXTS)))]
    listed = httpx.get(f"{server.url}/v1/activations/runs", params={"session": acts.session}, timeout=60).json()["data"]
    assert {run["run_id"] for run in listed} == {*acts.run_ids}


def test_a_session_loads_as_collect_returned_it_without_runs_that_are_there_twice(server):
    labels, tags = [True, False] * 6, [{"n": str(place)} for place in range(len(TEXTS))]
    acts = server.collect(TEXTS, ["layers.2.output", "norm.output"], labels=labels, tags=tags, session="client-whole")
    name = server.load_runs(acts.run_ids[:1])[0].facts["tags"][COLLECTED]
    twice = {"points": acts.points, "tokens": "prompt_last", "tags": {COLLECTED: name}, "sample_id": "0"}
    server.complete(TEXTS[0], max_tokens=0, session_id="client-whole", capture=twice | {"store_text": True})
    assert len(server.load_runs("client-whole")) == len(TEXTS)
    loaded = server.activations("client-whole", acts.points)
    np.testing.assert_allclose(loaded.values, acts.values, rtol=1e-4, atol=1e-4)
    assert (loaded.texts, loaded.points, loaded.session) == (acts.texts, acts.points, acts.session)
    assert loaded.run_ids[1:] == acts.run_ids[1:]
    assert loaded.tags[1:] == acts.tags[1:]


def test_a_session_of_different_points_asks_which(server):
    for point in ("norm.output", "layers.1.output"):
        server.collect(["Ann"], point, session="client-different")
    with pytest.raises(ValueError, match="points: runs of client-different have"):
        server.activations("client-different")


@pytest.mark.parametrize(
    ("ask", "meant"),
    [
        (lambda server: server.collect(["Ann"], "norm.output", token="all"), "'token': did you mean 'tokens'"),
        (lambda server: server.lens("Ann", target=" pens"), "'target': did you mean 'targets'"),
        (lambda server: server.generate("Ann", steering=[]), "'steering': did you mean 'steer'"),
    ],
)
def test_a_misspelt_argument_is_named_with_one_that_the_method_takes(server, ask, meant):
    with pytest.raises(TypeError, match=meant):
        ask(server)
    with pytest.raises(vitrine.ServerError, match="top_p"):
        server.lens("Ann", top_p=7)


def test_several_tokens_of_each_prompt_are_a_list(server):
    acts = server.collect(TEXTS[:5], "layers.1.output", tokens="all")
    runs = server.load_runs(acts.run_ids)
    assert [rows.shape for rows in acts.values] == [(run.facts["prompt_tokens"], 1, 192) for run in runs]


def test_chats_are_collected_with_their_templates(server):
    acts = server.collect(CHATS, "layers.1.output", labels=[True, False, True], max_tokens=2)
    assert acts.values.shape == (3, 1, 192)
    runs = server.load_runs(acts.run_ids)
    assert [run.facts["tags"]["label"] for run in runs] == ["true", "false", "true"]
    assert [run.facts["tokens"] - run.facts["prompt_tokens"] for run in runs] == [2, 2, 2]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"labels": [1]}, "labels: there are 1 for 2 prompts"),
        ({"tags": [{}]}, "tags: there are 1 for 2 prompts"),
        ({"tags": {"collected": "x"}}, "tags: 'collected' is a tag of the client's own"),
        ({"points": ["layers.0.output", "layers.0.attention.heads"]}, "points: rows have different shapes"),
        ({"prompts": "Ann has"}, "prompts: give a list"),
        ({"prompts": ["Ann", 3]}, r"prompts\[1\]: 3 is neither"),
    ],
)
def test_a_mistake_names_its_argument(server, wrong, message):
    given = {"prompts": ["Ann", "Tom"], "points": "layers.0.output"} | wrong
    with pytest.raises(ValueError, match=message):
        server.collect(**given)


def test_requests_hold_texts_of_about_one_length(monkeypatch):
    monkeypatch.setattr(prompt_batches, "PROMPTS_PER_REQUEST", 2)
    monkeypatch.setattr(prompt_batches, "MOST_CHARACTERS", 20)
    chat = [{"role": "user", "content": "so?"}]
    prompts = ["x" * 30, "x", chat, "x" * 9, "xx", "x" * 10, ""]
    assert prompt_batches.requests(prompts) == [[6, 1], [4, 3], [5], [0], [2]]
