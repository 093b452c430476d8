"""What operators see of the engine: Prometheus text that covers all nodes."""

from __future__ import annotations

import time

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


def test_the_engines_statistics_are_exported_by_name(served):
    body = {"model": "vitrine-demo", "prompt": "Tom has 3", "max_tokens": 5, "ignore_eos": True}
    assert httpx.post(f"{served.base_url}/completions", json=body, timeout=60).status_code == 200
    idle = {f"ray_vitrine_{name}": 0 for name in ("running", "waiting", "capture_bytes")}
    deadline, numbers = time.monotonic() + 90, {}
    # The replica tells Ray, and Ray its exporter, every few seconds each.
    while time.monotonic() < deadline and not (
        numbers.get("ray_vitrine_tokens_total", 0) >= 5 and idle.items() <= numbers.items()
    ):
        answer = httpx.get(f"{served.root}/metrics", timeout=30)
        assert answer.status_code == 200
        numbers = {name: value for (name, _), value in samples(answer.text).items()}
        time.sleep(0.5)
    assert numbers["ray_vitrine_tokens_total"] >= 5
    assert {name: numbers[name] for name in idle} == idle
    assert numbers["ray_vitrine_steps_total"] >= 5
    assert 0 < numbers["ray_vitrine_kv_bytes"] <= numbers["ray_vitrine_kv_budget_bytes"]
    assert numbers["ray_vitrine_step_seconds"] > 0
