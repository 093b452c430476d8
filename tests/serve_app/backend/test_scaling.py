"""Replicas that come and go with the load, to none and back."""

from __future__ import annotations

import json
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import ANY

import httpx
import pytest
from ray import serve

from benchmarks.common.measured_models import save
from deployments.options import DEMO
from serve_app import build_model
from tests.conftest import BIN

pytestmark = [
    pytest.mark.long,  # replicas start
    pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning"),  # its variables are global
]
APP = "scaling"
TINY = "tests/tiny"
ROOM = 20  # sequences that a replica holds, and requests that wait for the first one
SOON = {"metrics_interval_s": 0.5, "look_back_period_s": 2.0}
SOON |= {"upscale_delay_s": 1.0, "downscale_delay_s": 4.0, "downscale_to_zero_delay_s": 2.0}
TO_ZERO = {"min_replicas": 0, "max_replicas": 1, **SOON}
LIMIT_S = 240


@pytest.fixture(scope="module")
def models_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    save("tiny", directory / TINY)
    return directory


@pytest.fixture(scope="module")
def root(another_app, models_dir):
    with another_app(APP, "model=none", f"models_dir={models_dir}", "max_running=4", f"max_queued={ROOM - 4}") as root:
        yield root


@pytest.fixture
def scaled(root):
    """`scaled(model_id, autoscaling)` loads a model that scales, and unloads it in the end."""
    loaded = []

    def load(model_id: str, autoscaling: dict) -> None:
        loaded.append(model_id)
        body = {"model_id": model_id, "autoscaling": autoscaling}
        assert httpx.post(f"{root}/models/load", json=body, timeout=LIMIT_S).raise_for_status().json()["ok"]

    yield load
    for model_id in loaded:
        httpx.post(f"{root}/models/unload", json={"model_id": model_id}, timeout=LIMIT_S).raise_for_status()


def replicas(root: str, model_id: str) -> dict[str, int]:
    return httpx.get(f"{root}/health", timeout=60).json()["replicas"].get(model_id)


def say(root: str, model_id: str) -> httpx.Response:
    body = {"model": model_id, "prompt": "Tom has 3", "max_tokens": 4, "temperature": 0}
    return httpx.post(f"{root}/v1/completions", json=body, timeout=LIMIT_S)


def streamed(root: str) -> str:
    body = {"model": DEMO, "prompt": "Tom has 3", "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    with httpx.stream("POST", f"{root}/v1/completions", json=body | {"stream": True}, timeout=LIMIT_S) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events[-1] == "[DONE]", events[-1]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def test_replicas_come_and_go_under_streams_of_which_none_fails(root, scaled, eventually):
    scaled(DEMO, {"max_replicas": 2, "target_ongoing_requests": 4, **SOON})
    whole = streamed(root)
    crowd, one = threading.Event(), threading.Event()

    def keep_streaming(until: threading.Event) -> set[str]:
        texts = {streamed(root)}
        while not until.is_set():
            texts.add(streamed(root))
        return texts

    def running() -> dict[str, int]:
        for stream in streams:
            assert not (stream.done() and stream.exception()), stream.exception()
        return replicas(root, DEMO)

    with ThreadPoolExecutor(16) as pool:
        try:
            streams = [pool.submit(keep_streaming, one if number < 2 else crowd) for number in range(16)]
            eventually(running, lambda seen: seen.get("RUNNING") == 2, limit_s=LIMIT_S)
            crowd.set()
            eventually(running, lambda seen: seen == {"RUNNING": 1}, limit_s=LIMIT_S)
        finally:
            crowd.set()
            one.set()
        assert [stream.result() for stream in streams] == [{whole}] * 16


def test_a_model_scales_to_zero_and_its_first_requests_wait_for_a_replica_or_get_the_reason(
    root, scaled, models_dir, eventually
):
    scaled(TINY, TO_ZERO)
    model = httpx.get(f"{root}/v1/models/{TINY}", timeout=60).json()
    text = say(root, TINY).json()["choices"][0]["text"]

    def asleep() -> None:
        eventually(lambda: replicas(root, TINY), lambda seen: seen == {}, limit_s=LIMIT_S)
        health = httpx.get(f"{root}/health", timeout=60)
        assert (health.status_code, health.json()["loaded_models"]) == (200, [TINY])
        shown = model | {"asleep": True, "created": ANY}  # when the last replica started
        assert httpx.get(f"{root}/v1/models", timeout=60).json()["data"] == [shown]
        assert httpx.get(f"{root}/v1/models/{TINY}", timeout=60).json() == shown

    asleep()
    with ThreadPoolExecutor(ROOM + 2) as pool:
        answers = list(pool.map(lambda _: say(root, TINY), range(ROOM + 2)))
    late = [answer for answer in answers if answer.status_code == 429]
    texts = [answer.json()["choices"][0]["text"] for answer in answers if answer not in late]
    assert texts == [text] * ROOM
    assert [answer.headers["retry-after"] for answer in late] == ["1", "1"]

    asleep()
    weights = models_dir / TINY / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(b"no weights")
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: say(root, TINY), range(3)))
    for error in (answer.json()["error"] for answer in answers):
        assert (error["code"], error["param"]) == ("load_failed", "model"), error
        assert f"{TINY!r} cannot be loaded: " in error["message"]
    assert {answer.status_code for answer in answers} == {503}
    weights.write_bytes(whole)
    answer = eventually(lambda: say(root, TINY), lambda answer: answer.status_code == 200, limit_s=LIMIT_S)
    assert answer.json()["choices"][0]["text"] == text


def test_a_model_with_an_application_of_its_own_is_served_though_it_never_ran(root, eventually):
    options = {"num_cpus": 0.1, "threads": 1, "autoscaling": TO_ZERO | {"initial_replicas": 0}}
    name = f"{APP}.models.{DEMO}"
    serve.run(build_model(options), name=name, route_prefix=None)
    try:
        (shown,) = httpx.get(f"{root}/v1/models", timeout=60).json()["data"]
        assert shown.pop("created") > 0
        assert shown == {"id": DEMO, "object": "model", "owned_by": "vitrine", "asleep": True}
        assert httpx.get(f"{root}/health", timeout=60).status_code == 200
        assert httpx.get(f"{root}/v1/models/{DEMO}", timeout=LIMIT_S).json()["options"]["autoscaling"]
        assert say(root, DEMO).status_code == 200
    finally:
        serve.delete(name)


def test_what_a_file_may_not_change_is_refused_with_the_reason(cluster, served, tmp_path, eventually):
    model = {"import_path": "serve_app:build_model", "route_prefix": None, "args": {"num_cpus": 0.1}}
    ingress = {"import_path": "serve_app:build_app", "route_prefix": "/two", "args": {"model": "none"}}
    applications = [
        ingress | {"name": "two", "deployments": [{"name": "Ingress", "num_replicas": 2}]},
        model
        | {"name": "a.models.x", "deployments": [{"name": "ModelReplica", "ray_actor_options": {"num_cpus": 0.1}}]},
        model | {"name": "b.models.x"},
    ]
    said = {
        "two": "Remove num_replicas",
        "a.models.x": "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP",
        "b.models.x": f"must have the name 'b.models.{DEMO}'",
    }
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps({"applications": applications}))

    def messages() -> dict[str, str]:
        apps = serve.status().applications
        return {name: one.message for name in said if name in apps for one in apps[name].deployments.values()}

    subprocess.run([BIN / "serve", "deploy", file, "--address", cluster.dashboard], env=cluster.env, check=True)
    try:
        eventually(messages, lambda seen: all(said[name] in seen.get(name, "") for name in said), limit_s=LIMIT_S)
    finally:
        for name in said:
            serve.delete(name, _blocking=False)
