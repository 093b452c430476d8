"""Presets over HTTP: used by name or as default, and recorded with the run."""

from __future__ import annotations

import asyncio
import json
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import pytest
import ray
import torch

from deployments.accounts import OPERATOR
from deployments.activations import read_run
from deployments.activations.actors.store import connect
from deployments.options import home
from serve_app.backend import preset_registry
from serve_app.backend.preset_registry import Presets
from serve_app.http.errors import ApiError
from tests.serve_app.completions import BODY, MODEL, POINT, STEER, post, refused, text

HALF = {"op": "scale", "point": POINT, "factor": 0.5}


@pytest.fixture
def ask(served):
    """Asks `/v1/interventions`, or one below it."""

    def ask(method: str, name: str = "", root: str = served.root, **request) -> httpx.Response:
        return httpx.request(method, f"{root}/v1/interventions{name and '/'}{name}", timeout=60, **request)

    return ask


@pytest.fixture
def keep(ask):
    """`keep(name, **fields)`: a preset that is there until the test ends."""
    names = set()

    def keep(name: str, **fields):
        answer = ask("POST", json={"name": name, **fields})
        assert answer.status_code == 200, answer.text
        names.add(name)
        return answer.json()

    yield keep
    for name in names:
        ask("DELETE", name)


def recorded(served, **fields):
    answer = post(served, session_id="presets", **fields).json()
    (run,) = answer["activations_meta"]["runs"]
    return read_run(next(iter(run["points"].values()))["uri"], run_id=run["run_id"])


def test_a_preset_is_kept_shown_listed_replaced_and_deleted(ask, keep):
    kept = keep("formal", interventions=[STEER], model=MODEL, description="formal speech")
    assert kept["interventions"] == [STEER]
    assert kept["default"] is False
    assert ask("GET", "formal").json() == kept
    keep("another", capture={"points": [POINT]})
    page = ask("GET", params={"limit": 1000}).json()
    listed = {one["name"]: one for one in page["data"]}
    assert listed["formal"] == {name: value for name, value in kept.items() if name != "interventions"}
    assert [one["name"] for one in page["data"]] == sorted(listed)
    first = ask("GET", params={"limit": 1}).json()
    assert (len(first["data"]), first["has_more"]) == (1, True)
    assert keep("formal", interventions=[HALF])["interventions"] == [HALF]
    assert ask("GET", "formal").json()["model"] is None
    assert ask("DELETE", "formal").json() == {"name": "formal", "object": "preset", "deleted": True}
    for method in ("GET", "DELETE"):
        assert refused(ask(method, "formal")) == (404, "name", "preset_not_found")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"name": "x"}, None),
        ({"name": "none", "interventions": [STEER]}, "name"),
        ({"name": "x", "interventions": [STEER], "default": True}, "model"),
        ({"name": "x", "temperature": 3}, "temperature"),
        ({"name": "x", "stream": True}, "stream"),
        ({"name": "../x", "interventions": [STEER]}, "name"),
        ({"name": "x", "interventions": [STEER, STEER | {"op": "twist"}]}, "interventions[1]"),
        ({"name": "x", "interventions": [STEER | {"sclae": 1}]}, "interventions[0].sclae"),
        ({"name": "x", "capture": {"tokens": "few"}}, "capture.tokens"),
        ({"name": "x", "interventoins": [STEER]}, "interventoins"),
    ],
)
def test_what_is_no_preset_is_refused_by_its_field(ask, body, param):
    answer = ask("POST", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert refused(ask("GET", "x"))[0] == 404


def test_a_preset_for_a_model_that_is_served_has_to_fit_it(ask):
    for more, param in [
        ({"interventions": [HALF, HALF | {"point": "layers.99.output"}]}, "interventions[1].point"),
        ({"interventions": [STEER | {"vector": [1.0]}]}, "interventions[0].vector"),
        ({"interventions": [STEER | {"vector": "tensor-of-nobody"}]}, "interventions[0].vector"),
        ({"capture": {"points": ["layers.0.outptu"]}}, "capture.points[0]"),
        ({"readouts": ["nobodys"]}, "readouts[0].name"),
        ({"logit_lens": {"layers": [99]}}, "logit_lens.layers[0]"),
    ]:
        answer = ask("POST", json={"name": "misfit", "model": MODEL, "default": True} | more)
        assert refused(answer)[:2] == (400, param)
    assert refused(ask("GET", "misfit"))[0] == 404


def test_a_request_uses_a_preset_by_its_name_and_none_else_does(served, keep, client):
    keep("steer", interventions=[STEER])
    plain, steered = text(served), text(served, interventions=[STEER])
    assert plain != steered
    assert text(served, preset="steer") == steered
    assert text(served, preset="none") == text(served) == plain
    answer = post(served, preset="steer")
    assert answer.headers["x-vitrine-preset"] == "steer"
    assert "x-vitrine-preset" not in post(served).headers
    with httpx.stream(
        "POST",
        f"{served.base_url}/completions",
        json=BODY | {"stream": True, "preset": "steer"},
        timeout=60,
    ) as stream:
        assert stream.headers["x-vitrine-preset"] == "steer"
        assert stream.read()


def test_a_presets_interventions_come_before_the_requests_own_and_the_run_has_all(served, keep):
    keep("half", interventions=[HALF])
    capture = {"points": [POINT]}
    both = recorded(served, preset="half", interventions=[STEER], capture=capture)
    by_hand = recorded(served, interventions=[HALF, STEER], capture=capture)
    assert both.facts.interventions == by_hand.facts.interventions == [HALF, STEER]
    assert torch.equal(both[POINT], by_hand[POINT])
    again = recorded(served, preset="none", interventions=both.facts.interventions, capture=capture)
    assert torch.equal(again[POINT], both[POINT])


def test_a_preset_holds_other_fields_and_those_of_the_body_replace_them(served, keep):
    keep("short", max_tokens=3, stop=["x"], logit_lens={"layers": [-1]}, readouts=[])
    choice = post(served, preset="short", max_tokens=None).json()["choices"][0]
    assert len(choice["logit_lens"]["content"]) == 3
    assert text(served, preset="short") == text(served)  # the body has max_tokens
    answer = post(served, preset="short", best_of=2, temperature=1)
    assert answer.status_code == 200, answer.text


def test_headers_choose_a_preset_and_add_fields_below_the_body(served, keep):
    keep("half", interventions=[HALF])
    keep("steer", interventions=[STEER])

    def sent(headers, **fields):
        body = {name: value for name, value in (BODY | fields).items() if value is not None}
        return httpx.post(f"{served.base_url}/completions", json=body, headers=headers, timeout=60)

    def of(answer):
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    assert of(sent({"X-Vitrine-Preset": "steer"})) == text(served, preset="steer")
    assert of(sent({"X-Vitrine-Preset": "steer"}, preset="half")) == text(served, preset="half")
    added = {"preset": "half", "interventions": [STEER], "max_tokens": 2, "session_id": "by-header"}
    added["capture"] = {"points": [POINT], "tags": {"try": "1"}}
    answer = sent({"X-Vitrine-Body": json.dumps(added)}, max_tokens=None)
    (run,) = answer.json()["activations_meta"]["runs"]
    assert answer.json()["activations_meta"]["session_id"] == "by-header"
    facts = read_run(next(iter(run["points"].values()))["uri"], run_id=run["run_id"]).facts
    assert facts.interventions == [HALF, STEER]
    assert facts.tags == {"try": "1"}
    assert answer.json()["usage"]["completion_tokens"] == 2
    large = {str(i): "x" * 1000 for i in range(20)}  # other processes read a body of this size
    assert of(sent({"X-Vitrine-Preset": "steer"}, metadata=large)) == text(served, preset="steer")
    for value, param in [("task=a", "X-Vitrine-Body"), ("[]", "X-Vitrine-Body"), ('{"captrue": 1}', "captrue")]:
        assert refused(sent({"X-Vitrine-Body": value}))[:2] == (400, param)


def test_a_tool_loop_of_the_openai_package_is_recorded_by_its_header_alone(client):
    fields = {"session_id": "agent", "capture": {"points": [POINT], "tags": {"task": "arithmetic"}}}
    agent = client.with_options(default_headers={"X-Vitrine-Body": json.dumps(fields)})
    function = {"name": "calculator", "parameters": {"type": "object", "properties": {"expression": {}}}}
    asked = {"model": MODEL, "temperature": 0, "max_tokens": 48, "tools": [{"type": "function", "function": function}]}
    messages = [{"role": "user", "content": "Ann has 3 boxes of 12 pens. How many pens is that?"}]
    for turn in range(2):
        choice = {"tool_choice": "required"} if turn == 0 else {}
        message = agent.chat.completions.create(messages=messages, **asked, **choice).choices[0].message
        runs = client.get("/activations/session/agent", cast_to=object)["runs"]
        assert {run["run_id"]: run["tags"] for run in runs}[message.run_id] == {"task": "arithmetic"}
        results = [{"role": "tool", "tool_call_id": call.id, "content": "36"} for call in message.tool_calls or ()]
        messages += [message, *results]


def test_what_the_request_records_wins_over_the_presets(served, keep):
    keep("records", capture={"points": ["norm.output"], "tokens": "prompt"})
    assert set(recorded(served, preset="records")) == {"norm.output"}
    assert set(recorded(served, preset="records", store_activations=True)) == {"norm.output"}
    assert set(recorded(served, preset="records", capture={"points": [POINT]})) == {POINT}
    assert "activations_meta" not in post(served, preset="records", store_activations=False).json()
    answer = post(served, preset="records", best_of=2, n=1, temperature=1)
    assert refused(answer) == (400, "best_of", "invalid_value")


def test_a_default_preset_is_used_by_who_names_none_of_its_model(served, ask, keep):
    plain, steered = text(served), text(served, interventions=[STEER])
    keep("other", model="another/model", default=True, interventions=[HALF])
    assert text(served) == plain
    keep("everybodys", model=MODEL, default=True, interventions=[STEER], capture={"points": ["norm.output"]})
    answer = post(served)
    assert answer.json()["choices"][0]["text"] == steered
    assert answer.headers["x-vitrine-preset"] == "everybodys"
    assert "activations_meta" not in answer.json()  # it records where a request asks to
    assert "activations_meta" in post(served, preset="everybodys").json()
    assert text(served, preset=None) == steered
    assert text(served, preset="none") == plain
    run = recorded(served, store_activations=True)
    assert set(run) == {"norm.output"}
    assert run.facts.interventions == [STEER]
    assert set(recorded(served, capture={"points": [POINT]})) == {POINT}
    keep("mine", interventions=[HALF])
    halved = recorded(served, preset="mine", capture={"points": [POINT]})
    assert halved.facts.interventions == [HALF]
    keep("next", model=MODEL, default=True, interventions=[HALF])
    assert ask("GET", "everybodys").json()["default"] is False
    assert post(served).headers["x-vitrine-preset"] == "next"
    ask("DELETE", "next")
    assert text(served) == plain


@contextmanager
def no_step(statistics):
    before = statistics()["steps"]
    yield
    assert statistics()["steps"] == before


def test_what_does_not_fit_names_the_preset_or_the_requests_own_field(served, keep, statistics):
    with no_step(statistics):
        answer = post(served, preset="nobodys")
        assert refused(answer) == (400, "preset", "preset_not_found")
        assert "nobodys" in answer.json()["error"]["message"]
        keep("others", model="another/model", interventions=[HALF])
        assert refused(post(served, preset="others"))[1:] == ("preset", "preset_not_found")
        keep("unfit", interventions=[HALF, {"op": "zero", "point": "layers.99.output"}])
        answer = post(served, preset="unfit")
        assert refused(answer)[:2] == (400, "preset")
        assert "'unfit', interventions[1].point: there is no layer 99" in answer.json()["error"]["message"]
        keep("fits", interventions=[HALF], capture={"points": ["layers.99.output"]})
        own = {"op": "zero", "point": "layers.98.output"}
        answer = post(served, preset="fits", interventions=[HALF, own], capture={"points": [POINT]})
        assert refused(answer)[:2] == (400, "interventions[1].point")
        answer = post(served, preset="fits")
        assert refused(answer)[:2] == (400, "preset")
        assert "capture.points[0]" in answer.json()["error"]["message"]
        own = {"op": "zero", "point": POINT, "vectr": 1}  # does not fit any model
        answer = post(served, preset="fits", interventions=[HALF, own])
        assert refused(answer)[:2] == (400, "interventions[1].vectr")
        keep("twice", n=2)
        answer = post(served, preset="twice", variants=[[HALF]])
        assert refused(answer)[:2] == (400, "variants")
        assert "with the preset 'twice'" in answer.json()["error"]["message"]
        assert refused(post(served, preset="fits", interventions=1))[:2] == (400, "interventions")
        assert refused(post(served, preset="../x"))[:2] == (400, "preset")
        assert refused(post(served, preset={"x": 1}))[:2] == (400, "preset")


class Counted:
    """An actor's handle that counts what is asked of it."""

    def __init__(self, handle):
        self._handle = handle
        self.asked = []

    def __getattr__(self, name):
        self.asked.append(name)
        return getattr(self._handle, name)


def test_another_ingress_knows_of_a_default_within_a_second_and_asks_no_more_often(ask, keep, monkeypatch):
    store, now = Counted(connect(str(home() / "activations"))), [100.0]
    monkeypatch.setattr(preset_registry.time, "monotonic", lambda: now[0])
    other = Presets(store)

    async def default(times=1):
        found = [await other.chosen(OPERATOR, None, MODEL) for _ in range(times)]
        (name,) = {one and one.name for one in found}
        return name

    async def scene():
        assert await default(50) is None
        assert store.asked == ["client_data"]
        await asyncio.to_thread(keep, "seen", model=MODEL, default=True, interventions=[HALF])
        assert await default() is None
        now[0] += preset_registry.FRESH_S + 0.01
        assert await default(50) == "seen"
        assert store.asked == ["client_data"] * 2
        await asyncio.to_thread(ask, "DELETE", "seen")
        now[0] += preset_registry.FRESH_S + 0.01
        assert await default() is None

    asyncio.run(scene())


def test_before_the_store_has_answered_nothing_runs_without_a_default_it_should_have(monkeypatch):
    monkeypatch.setattr(preset_registry, "PATIENCE_S", 0.01)

    async def scene():
        silent = SimpleNamespace(remote=lambda *_: asyncio.get_running_loop().create_future())
        with pytest.raises(ApiError) as refused:
            await Presets(SimpleNamespace(client_data=silent)).chosen(OPERATOR, None, MODEL)
        assert refused.value.status == 503

    asyncio.run(scene())


@pytest.mark.usefixtures("cluster")
def test_while_the_store_does_not_answer_what_was_known_last_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(preset_registry, "PATIENCE_S", 60)
    monkeypatch.setattr(preset_registry, "FRESH_S", 0.0)
    store = connect(str(tmp_path))
    asked = Presets(store)

    async def default():
        return (await asked.chosen(OPERATOR, None, "m")).name

    async def scene():
        fields = {"name": "p", "model": "m", "default": True, "interventions": [HALF]}
        await asked.put(OPERATOR, preset_registry.PresetBody.model_validate(fields))
        assert await default() == "p"
        monkeypatch.setattr(preset_registry, "PATIENCE_S", 0.2)
        ray.kill(store)
        assert [await default() for _ in range(3)] == ["p"] * 3

    asyncio.run(scene())
