"""What operators see of the engine: Prometheus text that covers all nodes."""

from __future__ import annotations

from collections import Counter

import httpx
from prometheus_client.parser import text_string_to_metric_families

from serve_app.exposition import merge

NODE = """# HELP ray_vitrine_running Requests that hold a slot.
# TYPE ray_vitrine_running gauge
ray_vitrine_running{{WorkerId="{worker}",model="m"}} {value}
# HELP ray_vitrine_tokens_total Tokens generated.
# TYPE ray_vitrine_tokens_total counter
ray_vitrine_tokens_total{{WorkerId="{worker}",model="m"}} 7.0
# HELP ray_node_disk_free Not ours.
# TYPE ray_node_disk_free gauge
ray_node_disk_free 3.0
"""


def samples(text):
    return {
        (sample.name, sample.labels.get("WorkerId")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_metrics_of_all_nodes_stand_in_one_text_with_each_head_once():
    merged = merge([NODE.format(worker="a", value=1.0), NODE.format(worker="b", value=2.0)])
    assert samples(merged) == {
        ("ray_vitrine_running", "a"): 1.0,
        ("ray_vitrine_running", "b"): 2.0,
        ("ray_vitrine_tokens_total", "a"): 7.0,
        ("ray_vitrine_tokens_total", "b"): 7.0,
    }
    assert merged.count("# HELP ray_vitrine_running") == 1


def test_the_engines_statistics_are_exported_by_name(served, eventually):
    body = {"model": "vitrine-demo", "prompt": "Tom has 3", "max_tokens": 5, "ignore_eos": True}
    assert httpx.post(f"{served.base_url}/completions", json=body, timeout=60).status_code == 200
    idle = {f"ray_vitrine_{name}": 0 for name in ("running", "waiting", "capture_bytes")}

    def told() -> dict[str, float]:
        answer = httpx.get(f"{served.root}/metrics", timeout=30)
        assert answer.status_code == 200
        numbers: dict[str, float] = {}
        for (name, _), value in samples(answer.text).items():  # of every replica that has told Ray
            numbers[name] = max(value, numbers.get(name, 0))
        return numbers

    def fits(numbers: dict[str, float]) -> bool:
        return numbers.get("ray_vitrine_tokens_total", 0) >= 5 and idle.items() <= numbers.items()

    # The replica tells Ray, and Ray its exporter, every few seconds each.
    numbers = eventually(told, fits, limit_s=90)
    assert numbers["ray_vitrine_steps_total"] >= 5
    assert 0 < numbers["ray_vitrine_kv_bytes"] <= numbers["ray_vitrine_kv_budget_bytes"]
    assert numbers["ray_vitrine_step_seconds"] > 0


def test_requests_are_counted_by_route_and_how_they_ended(served, eventually):
    """The numbers of this project's own; Serve's count what never reached a replica."""

    def counted() -> Counter[tuple[str, str, str]]:
        told: Counter[tuple[str, str, str]] = Counter()
        for family in text_string_to_metric_families(httpx.get(f"{served.root}/metrics", timeout=30).text):
            for sample in family.samples:
                name, labels = sample.name.removeprefix("ray_vitrine_"), sample.labels
                if name != sample.name and "route" in labels:
                    told[name, labels["route"], labels.get("status", "")] += sample.value
        return told

    before = counted()
    chat = {"model": "vitrine-demo", "messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 3}
    text = {"model": "vitrine-demo", "prompt": ["Tom has", "Ann has"], "max_tokens": 3, "n": 2}
    prompts = 0.0
    for path, body in (("chat/completions", chat), ("completions", text)):
        answer = httpx.post(f"{served.base_url}/{path}", json=body, timeout=60)
        prompts += answer.json()["usage"]["prompt_tokens"]
        bad = httpx.post(f"{served.base_url}/{path}", json=body | {"max_tokens": 10**6}, timeout=60)
        assert bad.status_code == 400
    httpx.post(f"{served.base_url}/completions", json=text | {"stream": True}, timeout=60)
    prompts += answer.json()["usage"]["prompt_tokens"]
    chats, texts = routes = "/v1/chat/completions", "/v1/completions"
    asked = {
        ("requests_total", chats, "200"): 1,
        ("requests_total", chats, "400"): 1,
        ("requests_total", texts, "200"): 2,
        ("requests_total", texts, "400"): 1,
        ("request_seconds_count", chats, ""): 2,
        ("request_seconds_count", texts, ""): 3,
        ("first_token_seconds_count", texts, ""): 1,
    }
    asked["prompt_tokens_total", "", ""] = prompts

    def told() -> Counter[tuple[str, str, str]]:
        more = counted()
        more.subtract(before)
        more["prompt_tokens_total", "", ""] = sum(more["prompt_tokens_total", route, ""] for route in routes)
        return more

    # Ray tells its exporter every few seconds. More than was asked here: what other tests asked last may be told late.
    eventually(told, lambda more: all(more[key] >= asked[key] for key in asked), limit_s=90)
