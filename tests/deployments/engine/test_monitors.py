"""Monitors in the engine: values equal a readout's on the same rows, in any company, and thresholds end answers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deployments.conditions import Monitor
from deployments.engine import sequence
from deployments.engine.engine import Engine
from deployments.engine.kv_memory import KvMemory
from deployments.engine.request import Request, Sampling
from deployments.readouts.files import define
from deployments.readouts.gates import Source
from deployments.readouts.monitors import MonitorSet, Watched
from deployments.readouts.values import Readout

sys.path.append(str(Path(__file__).parent.parent / "readouts"))  # importlib mode adds no folder
from saes_by_hand import linear, sae

PROMPT, NEW, POINT = 7, 12, "layers.1.output"


@pytest.fixture
def monitors(tiny):
    """`monitors(*fields)`: a set of monitors of a small model, each of the readout that its fields name."""
    model = tiny("qwen3")
    (early, late) = (model.points.named(f"layers.{layer}.output", "")[0] for layer in (0, 1))
    files = {
        "late": (linear(32, 2, point=POINT, activation="none"), late),
        "sae": (sae(32, 64, "topk", point=POINT), late),
    }
    files["early"] = linear(32, seed=2, point="layers.0.output", activation="none"), early
    held = {name: (Readout(define(data, {"name": name}), model.device), at) for name, (data, at) in files.items()}

    def made(*fields: dict[str, Any]) -> MonitorSet:
        watched = []
        for given in fields:
            monitor = Monitor.model_validate(given)
            readout, at = held[monitor.readout]
            watched.append(Watched(monitor, Source(readout, at.place, monitor.readout), monitor.feature or 0))
        return MonitorSet(watched)

    return made


@pytest.mark.parametrize("fixed_memory", [False, True])
def test_values_are_those_of_the_readout_on_the_captured_rows(tiny, prompt, capturing, monitors, fixed_memory):
    model = tiny("qwen3")
    watching = monitors(
        {"readout": "late", "above": 1e9, "feature": 1},
        {"readout": "early", "below": 0.2, "tokens": "all", "for": 2},
        {"readout": "sae", "above": 0.1, "feature": 5, "name": "fifth"},
    )
    points = {"late": POINT, "early": "layers.0.output", "sae": POINT}
    of = [[POINT], *[["layers.*.output"]] * 4]  # so that places are not read in the model's order
    requests = [capturing(model, str(i), prompt(PROMPT + i, i), NEW - i, points=of[i]) for i in range(5)]
    requests = [replace(request, ignore_eos=True, monitors=watching) for request in requests]
    engine = Engine(model, prefill_tokens=9, fixed_memory=fixed_memory)
    for request, done in zip(requests[1:], engine.generate(requests)[1:], strict=True):
        for (monitor, source, column), result in zip(watching.watched, done.monitored, strict=True):
            want = source.readout.encode(done.captured.values[points[monitor.readout]])[:, column]
            start = 0 if monitor.tokens == "all" else len(request.prompt)
            read = done.captured.values[f"readouts.monitor.{monitor.called}"][:, 0]
            torch.testing.assert_close(read[start:], want[start:])
            assert read[:start].isnan().all()
            read = read[start:].tolist()
            extreme = min(read) if monitor.below else max(read)
            assert result[:3] == (monitor.called, extreme, start + read.index(extreme))
            met = [value < monitor.below if monitor.below else value > monitor.above for value in read]
            fired = [start + i for i in range(monitor.rows - 1, len(met)) if all(met[i - monitor.rows + 1 : i + 1])]
            assert result.fired == (fired[0] if fired else None)


def test_a_monitor_ends_an_answer_whatever_the_request_says(tiny, prompt, capturing, monitors, monkeypatch):
    monkeypatch.setattr(sequence, "RESERVED_TOKENS", 1)
    model = tiny("qwen3", num_hidden_layers=2, max_position_embeddings=256)
    requests = [
        replace(capturing(model, str(i), prompt(60 + i, i), 60, points=[POINT]), ignore_eos=True) for i in range(2)
    ]
    plain = Engine(model).generate(requests)
    watching = monitors({"readout": "late", "above": -1e9, "do": "stop", "for": 5})
    asked = [replace(one, monitors=watching, sampling=Sampling(0.0, min_tokens=50)) for one in requests]
    tight = Engine(model, kv_bytes=130 * KvMemory(model, 1, kv_bytes=1).position_bytes)
    for whole, done in zip(plain, tight.generate(asked), strict=True):
        assert (done.tokens, done.reason) == (whole.tokens[:5], "stop")
        assert done.stop_reason[2:] == (len(done.prompt) + 4, "late")


def test_monitors_of_generated_tokens_leave_prefixes_to_be_reused(tiny, prompt, monitors):
    model, ids = tiny("qwen3"), prompt(70)
    for tokens, reused in (("generated", 64), ("all", 0)):
        engine, watching = Engine(model), monitors({"readout": "late", "above": 1e9, "tokens": tokens})
        first, second = (
            engine.generate([Request(name, ids, 3, ignore_eos=True, monitors=watching)])[0] for name in ("a", "b")
        )
        assert (second.cached, second.monitored) == (reused, first.monitored)
