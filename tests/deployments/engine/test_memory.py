"""KV memory that cannot grow fails who needed it, and nobody else."""

from __future__ import annotations

import pytest
import torch

from deployments.engine.cache import SlotLayer
from deployments.engine.engine import Engine
from deployments.engine.request import Request


def test_running_out_of_memory_while_growing_ends_the_newcomer_alone(tiny, monkeypatch):
    model = tiny("qwen3", max_position_embeddings=1024)
    alone = Engine(model).generate([Request("a", [5, 6, 7], 40, ignore_eos=True)])[0]
    engine = Engine(model)
    engine.submit(Request("a", [5, 6, 7], 40, ignore_eos=True))
    engine.step()
    held = engine._cache.bytes
    allocate, calls = SlotLayer._allocate, []

    def out_of_memory_at_the_fourth(layer, like):
        calls.append(like)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("no memory for the fourth")
        return allocate(layer, like)

    monkeypatch.setattr(SlotLayer, "_allocate", out_of_memory_at_the_fourth)
    engine.submit(Request("b", [8] * 600, 10, ignore_eos=True))
    done = {}
    while len(done) < 2:
        done.update((event.id, event) for event in engine.step() if hasattr(event, "reason"))
    assert done["b"].reason == "error"
    assert "no memory" in done["b"].error
    assert list(done["a"].tokens) == list(alone.tokens)
    assert engine._cache.bytes == held


def test_two_requests_of_one_id_are_refused_before_any_runs(tiny):
    engine = Engine(tiny("qwen3"))
    with pytest.raises(ValueError, match="same id"):
        engine.generate([Request("a", [5], 1), Request("a", [6], 1)])
    assert engine.statistics.tokens == 0


def test_a_bad_request_among_good_ones_leaves_none_behind(tiny):
    engine = Engine(tiny("qwen3"))
    with pytest.raises(ValueError, match="no tokens"):
        engine.generate([Request("a", [5], 1), Request("b", [], 1)])
    engine.generate([Request("c", [5], 2, ignore_eos=True)])
    assert engine.statistics.tokens == 2
