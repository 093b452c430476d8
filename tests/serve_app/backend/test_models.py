"""Several models: loaded and unloaded while the server runs, without effect on each other.

A load takes seconds: tests share one application, and where they can the tiny model as the first of them loaded it.
"""

from __future__ import annotations

import asyncio
import json
import traceback
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from ray import serve
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common.measured_models import save
from deployments.activations import read_run
from deployments.model.load import revision_of
from deployments.options import DEMO, NO_MODEL, Options
from serve_app import build_app
from serve_app.backend import model_loader, served_model
from serve_app.backend.model_registry import Models
from serve_app.http.errors import ApiError
from serve_app.schemas.models import LoadRequest
from tests.adapters import lora

APP = "several"
TINY = "tests/tiny"
ADAPTED = f"{TINY}+tests/lora"
ONCE = """# The code of a model that starts once: what comes second waits until it is told to fail.
import os
import time

from transformers import Qwen3Config as Config

HERE = {here!r}
try:
    os.mkdir(HERE + "/started")
except FileExistsError:
    while not os.path.exists(HERE + "/fail"):
        time.sleep(0.05)
    raise RuntimeError("no second replica")
"""
SAVEPOINTS = [{"name": "middle", "selector": "layers.1.input"}, {"name": "mixed", "selector": "model.layers.0.mlp"}]
SETTINGS = {"savepoints": SAVEPOINTS, "dtype": "float32", "attention": "eager"}
LOADED = {"ok": True, "model": TINY, "savepoints": SAVEPOINTS}


class Server:
    """The routes of one application."""

    def __init__(self, root: str) -> None:
        self.root = root

    def post(self, path: str, **body) -> httpx.Response:
        return httpx.post(self.root + path, json=body, timeout=120)

    def get(self, path: str):
        return httpx.get(self.root + path, timeout=60)

    def load(self, model_id: str, **settings) -> dict:
        answer = self.post("/models/load", model_id=model_id, **settings)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def unload(self, model_id: str) -> None:
        answer = self.post("/models/unload", model_id=model_id)
        assert answer.status_code == 200, answer.text

    def say(self, model: str, **fields) -> httpx.Response:
        body = {"prompt": "Tom has 3", "max_tokens": 4, "temperature": 0} | fields
        return self.post("/v1/completions", model=model, **body)

    @property
    def served(self) -> set[str]:
        return {model["id"] for model in self.get("/v1/models").json()["data"]}


@pytest.fixture(scope="module")
def models_dir(tmp_path_factory):
    """Models that may be loaded by name: one that is served, and one that cannot be."""
    directory = tmp_path_factory.mktemp("models")
    save("tiny", directory / TINY)
    save("tiny", directory / "tests/broken")
    (directory / "tests/broken/model.safetensors").write_bytes(b"no weights")
    return directory


@pytest.fixture(scope="module")
def options(models_dir):
    """Those of the application, which starts without a model."""
    given = {"model": NO_MODEL, "models_dir": str(models_dir), "num_cpus": 0.1, "threads": 1}
    return Options.model_validate(given | {"allow_remote_code": True})


@pytest.fixture(scope="module")
def server(served, options):
    serve.run(build_app(options), name=APP, route_prefix=f"/{APP}")
    server = Server(f"{served.root}/{APP}")
    yield server
    for model in applications():
        serve.delete(model, _blocking=False)
    serve.delete(APP)


@pytest.fixture
def empty(server):
    """The server, without a model."""
    unload_all(server)
    return server


@pytest.fixture
def with_tiny(server):
    """The server, with the tiny model with all settings, which stays there."""
    server.load(TINY, **SETTINGS)
    return server


def unload_all(server: Server) -> None:
    for model_id in server.get("/health").json()["replicas"]:
        server.unload(model_id)
    assert applications() == set()


@pytest.fixture
def once(models_dir):
    """The directory of a model of which only the first replica starts: `tests/once`."""
    directory = models_dir / "tests/once"
    save("tiny", directory)
    (directory / "once.py").write_text(ONCE.format(here=str(directory)))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "once.Config"}}))
    return directory


def applications() -> set[str]:
    return {name for name in serve.status().applications if ".models." in name}


def test_a_server_without_a_model_is_healthy_and_serves_none(empty):
    answer = empty.get("/health")
    assert answer.status_code == 200
    assert answer.json() == {"status": "ok", "loaded_models": [], "replicas": {}}
    assert empty.served == set()
    assert empty.say(TINY).status_code == 404
    answer = empty.post("/models/unload", model_id=TINY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_two_models_come_go_and_record_side_by_side_and_neither_disturbs_the_other(empty, eventually):
    empty.load(DEMO, dtype="float32", max_seq_len=1024)
    fields = {"max_tokens": 900, "ignore_eos": True}
    whole = empty.say(DEMO, **fields).json()["choices"][0]["text"]
    body = {"model": DEMO, "prompt": "Tom has 3", "temperature": 0, "stream": True} | fields
    with httpx.stream("POST", f"{empty.root}/v1/completions", json=body, timeout=120) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        events = [next(lines)]
        with ThreadPoolExecutor(2) as pool:
            rest = pool.submit(lambda: list(lines))
            broken = pool.submit(empty.post, "/models/load", model_id="tests/broken")
            assert empty.load(TINY, **SETTINGS) == LOADED
            refused_for(broken.result(), 500, None, "load_failed")
            assert len(applications()) == 2  # of the broken one nothing is left
            both(empty)
            events += rest.result()
    assert told(events) == whole
    goes(empty, body, whole, eventually)
    assert empty.served == {TINY}


def told(events: list[str]) -> str:
    """The text of a whole stream."""
    assert events[-1] == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def both(server: Server) -> None:
    """Two models are served, and record."""
    assert server.served == {TINY, DEMO}
    model = server.get(f"/v1/models/{DEMO}").json()
    assert (model["max_model_len"], model["options"]["num_gpus"], model["device_name"]) == (1024, 0, None)
    health = server.get("/health").json()
    assert set(health["loaded_models"]) == {TINY, DEMO}
    assert health["replicas"] == {DEMO: {"RUNNING": 1}, TINY: {"RUNNING": 1}}
    widths = {}
    for model in (TINY, DEMO):
        answer = server.say(model, capture={"points": ["layers.1.output"]}).json()
        assert answer["model"] == model
        point = answer["activations_meta"]["runs"][0]["points"]["layers.1.output"]
        run = answer["choices"][0]["run_id"]
        widths[model] = point["shape"][1]
        assert list(read_run(point["uri"], run_id=run)["layers.1.output"].shape) == point["shape"]
    assert widths[TINY] == 32
    assert widths[DEMO] != 32


def goes(server: Server, body: dict, whole: str, eventually) -> None:
    """A model that is unloaded finishes what it runs, and takes nothing new."""
    with (
        ThreadPoolExecutor(2) as pool,
        httpx.stream("POST", f"{server.root}/v1/completions", json=body, timeout=120) as answer,
    ):
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        events = [next(lines)]
        unloads = [pool.submit(server.unload, DEMO) for _ in range(2)]
        eventually(lambda: server.say(DEMO).status_code, lambda status: status == 404)
        assert told(events + list(lines)) == whole
        for unload in unloads:
            unload.result()


def fails(server: Server, body: dict, status: int, param: str | None, code: str) -> str:
    """Assert that a load fails with this reason, and leaves nothing; gives what it says."""
    before, health = applications(), server.get("/health").json()
    message = refused_for(server.post("/models/load", **body), status, param, code)
    assert applications() == before
    assert server.get("/health").json() == health
    return message


def refused_for(answer: httpx.Response, status: int, param: str | None, code: str) -> str:
    """Assert that a load was answered with this reason; gives what it says."""
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code), error
    assert error["message"]
    return error["message"]


@pytest.mark.long
def test_a_load_that_failed_says_what_is_near_and_loads_at_once_of_what_is_right_are_one(empty, eventually):
    wrong = {"model_id": TINY, "savepoints": [SAVEPOINTS[0], {"name": "b", "selector": "layers.1.outptu"}]}
    assert "layers.1.output" in fails(empty, wrong, 400, "savepoints[1].selector", "unknown_point")
    seen = set()

    def serves() -> bool:
        answer = empty.say(TINY)
        if answer.status_code != 200:
            seen.add((answer.status_code, answer.json()["error"]["code"]))
        if answer.status_code == 503:
            assert answer.headers["retry-after"]
        assert empty.get("/health").status_code == 200  # a model that loads is no reason to be ill
        return answer.status_code == 200

    with ThreadPoolExecutor(4) as pool:
        loads = [pool.submit(empty.load, TINY, **SETTINGS) for _ in range(2)]
        eventually(lambda: TINY in empty.get("/health").json()["replicas"])
        loads += [pool.submit(empty.load, TINY) for _ in range(2)]  # bare ones join what is under way
        eventually(serves)
        assert [load.result() for load in loads] == [LOADED] * 4
    assert empty.get("/health").json()["replicas"] == {TINY: {"RUNNING": 1}}
    assert len(applications()) == 1
    assert (503, "model_loading") in seen
    assert seen <= {(404, "model_not_found"), (503, "model_loading")}


def test_a_loaded_model_records_its_savepoints_and_loading_it_again_loads_nothing(with_tiny):
    created = with_tiny.get(f"/v1/models/{TINY}").json()["created"]
    assert with_tiny.load(TINY, savepoints=SAVEPOINTS, dtype="float32") == LOADED
    assert with_tiny.load(TINY) == LOADED
    assert with_tiny.get(f"/v1/models/{TINY}").json()["created"] == created
    for name, other in (("dtype", "bfloat16"), ("attention", "sdpa")):
        answer = with_tiny.post("/models/load", model_id=TINY, **{name: other})
        assert (answer.status_code, answer.json()["error"]["param"]) == (409, name)
        assert answer.json()["error"]["code"] == "model_loaded_otherwise"
    assert with_tiny.get(f"/v1/models/{TINY}").json()["savepoints"] == SAVEPOINTS
    answer = with_tiny.say(TINY, store_activations=True).json()
    assert set(answer["activations_meta"]["runs"][0]["points"]) == {"middle", "mixed"}
    capture = {"points": ["middle", "layers.1.input", "mixed", "layers.0.mlp.output"], "return": "inline"}
    points = with_tiny.say(TINY, capture=capture).json()["activations_meta"]["runs"][0]["points"]
    assert points["middle"]["data"] == points["layers.1.input"]["data"]
    assert points["mixed"]["data"] == points["layers.0.mlp.output"]["data"]


def test_a_model_is_served_beside_the_same_with_an_adapter(with_tiny, models_dir):
    pytest.importorskip("peft")
    directory = models_dir / "tests/lora"
    apart = lora(AutoModelForCausalLM.from_pretrained(models_dir / TINY), directory)
    body = {"model_id": TINY, "adapter": "tests/lora"}
    assert with_tiny.load(**body)["model"] == ADAPTED
    assert with_tiny.load(**body)["model"] == ADAPTED
    refused_for(with_tiny.post("/models/load", dtype="bfloat16", **body), 409, "dtype", "model_loaded_otherwise")
    prompt = AutoTokenizer.from_pretrained(models_dir / TINY)("Tom has 3", return_tensors="pt").input_ids
    expected = apart.generate(input_ids=prompt, max_new_tokens=4, do_sample=False)[0].tolist()
    runs = {}
    for model in (TINY, ADAPTED):
        (told,) = with_tiny.say(model, capture={"points": ["norm.output"]}).json()["activations_meta"]["runs"]
        runs[model] = read_run(told["points"]["norm.output"]["uri"], run_id=told["run_id"])
    assert runs[ADAPTED].token_ids.tolist() == expected != runs[TINY].token_ids.tolist()
    revision = with_tiny.get(f"/v1/models/{ADAPTED}").json()["adapter_revision"]
    assert revision == revision_of(str(directory))
    facts = runs[ADAPTED].segment
    assert (facts.model, facts.adapter, facts.adapter_revision) == (ADAPTED, "tests/lora", revision)
    with_tiny.unload(ADAPTED)
    assert with_tiny.served == {TINY}
    fails(with_tiny, body | {"adapter": "tests/none"}, 404, "adapter", "model_not_found")


def test_a_model_loaded_with_eager_attention_shows_its_patterns(with_tiny):
    capture = {"points": ["layers.1.attention.weights"], "return": "inline"}
    points = with_tiny.say(TINY, capture=capture).json()["activations_meta"]["runs"][0]["points"]
    rows = points["layers.1.attention.weights"]["data"]
    assert [len(head) for row in rows for head in row[:1]] == list(range(1, len(rows) + 1))


@pytest.mark.long
def test_an_unload_past_its_limit_says_so_and_goes_on(with_tiny, options, eventually, monkeypatch):
    body = {"model": TINY, "prompt": "Tom", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{with_tiny.root}/v1/completions", json=body, timeout=120) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        next(lines)
        monkeypatch.setattr(model_loader, "REMOVAL_S", 0)
        late = refused(options.model_copy(update={"request_timeout_s": 0.2}), lambda loader: loader.unload(TINY))
        assert (late.status, late.code) == (504, "unload_timeout")
        assert list(lines)[-1] == "[DONE]"
    eventually(applications, lambda left: left == set())


def refused(options: Options, ask) -> ApiError:
    """What a loader of the application with other limits says: `ask(loader)` fails."""

    async def asked() -> ApiError:
        with pytest.raises(ApiError) as raised:
            await ask(model_loader.Loader(options, Models(options, APP)))
        return raised.value

    return asyncio.run(asked())


def test_what_serve_says_of_a_failure_is_told_without_its_traceback():
    try:
        raise RuntimeError("no room")
    except RuntimeError:
        said = f"A replica failed to start with exception. Retrying. Error:\n{traceback.format_exc()}"
    assert __file__ in said
    assert served_model.reason(said).message == "RuntimeError: no room"


FAILURES = [
    ({"model_id": TINY, "attention": "flash"}, 400, "attention", "invalid_value"),
    ({"model_id": "/etc"}, 400, "model_id", "invalid_value"),
    ({"model_id": "../tests/tiny"}, 400, "model_id", "invalid_value"),
    ({"model_id": TINY, "savepints": []}, 400, "savepints", "unknown_field"),
]


@pytest.mark.parametrize(("body", "status", "param", "code"), FAILURES, ids=[f"{b[3]}-{b[2]}" for b in FAILURES])
def test_a_load_that_fails_says_why_and_leaves_nothing(server, body, status, param, code):
    fails(server, body, status, param, code)


@pytest.mark.long  # three starts of a replica that fails
@pytest.mark.usefixtures("empty")
def test_a_load_fails_with_a_later_replica_as_with_the_first(server, once, eventually):
    model_id = "tests/once"
    body = {"model_id": model_id, "num_replicas": 2, "trust_remote_code": True}
    with ThreadPoolExecutor(1) as pool:
        post = pool.submit(server.post, "/models/load", **body)
        eventually(lambda: server.get("/health").json()["replicas"], lambda seen: "RUNNING" in seen.get(model_id, {}))
        (once / "fail").touch()
        answer = post.result()
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (500, "load_failed"), error
    assert error["message"] == "RuntimeError: no second replica"
    assert applications() == set()


@pytest.mark.long  # a replica starts
@pytest.mark.usefixtures("empty")
def test_a_load_past_the_servers_limit_is_given_up(options, eventually):
    hurried = options.model_copy(update={"load_timeout_s": 0.1})
    late = refused(hurried, lambda loader: loader.load(LoadRequest(model_id=TINY)))
    assert (late.status, late.code) == (504, "load_timeout")
    eventually(applications, lambda left: left == set())


def test_the_model_that_a_server_starts_with_is_loaded_already_and_stays(served):
    shared = Server(served.root)
    assert shared.load(DEMO) == {"ok": True, "model": DEMO, "savepoints": []}
    answer = shared.post("/models/unload", model_id=DEMO)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "model_is_default")
    assert shared.say(DEMO).status_code == 200


def test_by_default_no_models_own_code_is_run(served):
    body = {"model_id": TINY, "trust_remote_code": True}
    fails(Server(served.root), body, 403, "trust_remote_code", "remote_code_not_allowed")
