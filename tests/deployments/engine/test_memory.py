"""Where memory ends, as few requests as can be end with it, and the engine goes on."""

from __future__ import annotations

import pytest
import torch

from deployments.engine.cache import SlotLayer
from deployments.engine.engine import Engine
from deployments.engine.request import Request


def test_a_newcomer_for_whom_memory_cannot_grow_waits_and_touches_nobody(tiny, monkeypatch, drain, endings):
    model = tiny("qwen3", max_position_embeddings=1024)
    requests = [Request("a", [5, 6, 7], 40, ignore_eos=True), Request("b", [8] * 600, 10, ignore_eos=True)]
    alone = Engine(model).generate(requests)
    engine = Engine(model)
    engine.submit(requests[0])
    engine.step()
    allocate = SlotLayer._allocate

    def out_of_memory_while_another_runs(layer, like):
        if len(engine._batch) and layer.window.slots * layer.window.capacity > 256:
            raise torch.OutOfMemoryError("Tried to allocate 9.00 GiB")
        return allocate(layer, like)

    monkeypatch.setattr(SlotLayer, "_allocate", out_of_memory_while_another_runs)
    engine.submit(requests[1])
    done = endings(drain(engine))
    assert engine.statistics.out_of_memory > 0
    for request, want in zip(requests, alone, strict=True):
        assert done[request.id].reason == "length"
        assert list(done[request.id].tokens) == list(want.tokens)


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
