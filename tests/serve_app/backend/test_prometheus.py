"""Metrics of the engine for operators: Prometheus text that covers all nodes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve_app.backend import prometheus
from serve_app.backend.prometheus import NodeMetrics, merge

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
    merged = merge([NODE.format(worker=worker, value=value).encode() for worker, value in (("a", 1.0), ("b", 2.0))])
    merged = merged.decode()
    assert samples(merged) == {
        ("ray_vitrine_running", "a"): 1.0,
        ("ray_vitrine_running", "b"): 2.0,
        ("ray_vitrine_tokens_total", "a"): 7.0,
        ("ray_vitrine_tokens_total", "b"): 7.0,
    }
    assert merged.count("# HELP ray_vitrine_running") == 1


def test_a_node_of_another_version_says_no_head_twice():
    other = NODE.replace("Requests that hold", "Requests with")
    merged = merge([NODE.format(worker="a", value=1.0).encode(), other.format(worker="b", value=2.0).encode()]).decode()
    assert merged.count("# HELP ray_vitrine_running") == merged.count("# TYPE ray_vitrine_running") == 1
    assert samples(merged)["ray_vitrine_running", "b"] == 2.0


class Exporter:
    """A node's exporter that writes what it is told to, and counts who asks."""

    def __init__(self, parts: Iterable[bytes] = (NODE.format(worker="a", value=1.0).encode(),), hangs: bool = False):
        self.parts = parts
        self.hangs = hangs
        self.asked = 0
        self._answers = list[Any]()

    @asynccontextmanager
    async def up(self) -> AsyncIterator[NodeMetrics]:
        """What reads it."""
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()

        async def exporters() -> list[str]:
            return [f"http://{host}:{port}/metrics"]

        try:
            yield NodeMetrics(exporters)
        finally:
            server.close()
            await asyncio.gather(*self._answers)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._answers.append(asyncio.current_task())
        self.asked += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        with contextlib.suppress(ConnectionError):  # who asked has enough
            for part in self.parts:
                writer.write(part)
                await writer.drain()
            if self.hangs:
                await reader.read()
            writer.close()
            await writer.wait_closed()


def test_many_who_ask_at_once_and_soon_after_cause_one_read(monkeypatch):
    monkeypatch.setattr(prometheus, "FRESH_S", 60.0)
    exporter = Exporter()

    async def asked() -> list[bytes]:
        async with exporter.up() as metrics:
            return [*await asyncio.gather(*(metrics.text() for _ in range(50))), await metrics.text()]

    texts = asyncio.run(asked())
    assert exporter.asked == 1
    assert len(set(texts)) == 1
    assert samples(texts[0].decode())["ray_vitrine_running", "a"] == 1.0


def test_one_who_goes_takes_nothing_from_the_others():
    exporter = Exporter()

    async def asked() -> bytes:
        async with exporter.up() as metrics:
            first, second = (asyncio.create_task(metrics.text()) for _ in range(2))
            await asyncio.sleep(0)
            first.cancel()
            return await second

    assert b"ray_vitrine_running" in asyncio.run(asked())
    assert exporter.asked == 1


def test_old_numbers_are_read_again(monkeypatch):
    monkeypatch.setattr(prometheus, "FRESH_S", 0.0)
    exporter = Exporter()

    async def asked() -> None:
        async with exporter.up() as metrics:
            await metrics.text()
            await metrics.text()

    asyncio.run(asked())
    assert exporter.asked == 2


@pytest.mark.parametrize("down", ["hangs", "never ends", "refuses"])
def test_a_node_whose_exporter_hangs_never_ends_or_refuses_is_left_out_and_named(down, monkeypatch):
    monkeypatch.setattr(prometheus, "READ_S", 0.5 if down == "hangs" else 60)
    monkeypatch.setattr(prometheus, "MOST_BYTES", 1 << 20)
    broken = Exporter(itertools.repeat(b"#" * 1024)) if down == "never ends" else Exporter((), hangs=True)

    async def asked() -> tuple[list[str], str]:
        async with Exporter().up() as one, broken.up() as other:
            exporters = [*await one._exporters(), *await other._exporters()]
            if down == "refuses":
                exporters[1] = "http://127.0.0.1:1/metrics"
            text = await NodeMetrics(lambda: asyncio.sleep(0, exporters)).text()
            return exporters, text.decode()

    (up, gone), text = asyncio.run(asked())
    assert samples(text)["ray_vitrine_running", "a"] == 1.0
    assert f'vitrine_exporter_up{{exporter="{up}"}} 1' in text.splitlines()
    assert f'vitrine_exporter_up{{exporter="{gone}"}} 0' in text.splitlines()


def exported(served, eventually) -> str:
    """The server's text, once Ray's agent has started and answers."""

    def asked() -> str:
        return httpx.get(f"{served.root}/metrics", timeout=60).raise_for_status().text

    return eventually(asked, lambda text: re.search(r"^vitrine_exporter_up.* 1$", text, re.MULTILINE))


def test_the_engines_statistics_are_exported_by_name(served, eventually):
    filled = "Tom has 3 apples. " * 20  # its full pages stay in memory for later prompts
    body = {"model": "vitrine-demo", "prompt": filled, "max_tokens": 5, "ignore_eos": True}
    assert httpx.post(f"{served.base_url}/completions", json=body, timeout=60).status_code == 200
    idle = {f"ray_vitrine_{name}": 0 for name in ("running", "waiting", "capture_bytes")}

    def told() -> dict[str, float]:
        numbers: dict[str, float] = {}
        for (name, _), value in samples(exported(served, eventually)).items():  # of every replica that has told Ray
            numbers[name] = max(value, numbers.get(name, 0))
        return numbers

    def fits(numbers: dict[str, float]) -> bool:
        told = numbers.get("ray_vitrine_tokens_total", 0) >= 5 and numbers.get("ray_vitrine_kv_bytes", 0) > 0
        return told and idle.items() <= numbers.items()

    # The replica tells Ray, and Ray its exporter, every few seconds each.
    numbers = eventually(told, fits, limit_s=90)
    assert numbers["ray_vitrine_steps_total"] >= 5
    assert numbers["ray_vitrine_kv_bytes"] <= numbers["ray_vitrine_kv_budget_bytes"]
    assert numbers["ray_vitrine_step_seconds"] > 0


def test_requests_are_counted_by_route_and_how_they_ended(served, eventually):
    """The numbers of this project's own; Serve's count what never reached a replica."""

    def counted() -> Counter[tuple[str, str, str]]:
        told: Counter[tuple[str, str, str]] = Counter()
        for family in text_string_to_metric_families(exported(served, eventually)):
            for sample in family.samples:
                name, labels = sample.name.removeprefix("ray_vitrine_"), sample.labels
                if name != sample.name and labels.keys() & {"route", "status"}:
                    told[name, labels.get("route", ""), labels.get("status", "")] += sample.value
        return told

    before = counted()
    chat = {"model": "vitrine-demo", "messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 3}
    chat |= {"session_id": "counted", "capture": {"layers": [0], "sites": ["output"]}}
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
        ("runs_total", "", "stored"): 1,
    }
    asked["prompt_tokens_total", "", ""] = prompts

    def told() -> Counter[tuple[str, str, str]]:
        more = counted()
        more.subtract(before)
        more["prompt_tokens_total", "", ""] = sum(more["prompt_tokens_total", route, ""] for route in routes)
        return more

    # Ray tells its exporter every few seconds. More than was asked here: what other tests asked last may be told late.
    eventually(told, lambda more: all(more[key] >= asked[key] for key in asked), limit_s=90)
