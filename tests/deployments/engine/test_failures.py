"""A failure of one request, or in a model's code, ends no other request and does not end the engine."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import FunctionType

import pytest
import torch

from deployments.engine.capture.buffer import CaptureBuffer
from deployments.engine.decoding import sampling
from deployments.engine.engine import Engine
from deployments.engine.request import Request, Rows, Sampling


def test_a_request_whose_token_cannot_be_taken_ends_alone(tiny, prompt, drain, endings, monkeypatch):
    model = tiny("qwen3")
    requests = [Request(str(i), prompt(4 + i), 5, ignore_eos=True) for i in range(3)]
    alone = [done.tokens for done in Engine(model).generate(requests)]
    engine = Engine(model)
    for request in requests:
        engine.submit(replace(request, streamed=False))
    events = engine.step()
    broken = next(seq for seq in engine._scheduler.running if seq.request.id == "1")

    def fails(*_, **__):
        raise ValueError("the tokenizer's own fault")

    monkeypatch.setattr(broken.text, "add", fails)
    done = endings([*events, *drain(engine)])
    assert done["1"].reason == "error"
    assert "the tokenizer's own fault" in done["1"].error
    assert [done[id].tokens for id in ("0", "2")] == [alone[0], alone[2]]


def test_a_request_that_cannot_be_taken_in_ends_alone(tiny, prompt, drain, endings, monkeypatch):
    engine = Engine(tiny("qwen3"))

    class Broken:
        def begin(self):
            raise ValueError("the grammar's own fault")

    engine.submit(Request("broken", prompt(4), 3, grammar=Broken()))
    engine.submit(Request("sound", prompt(5), 3, ignore_eos=True))
    done = endings(drain(engine))
    assert (done["broken"].reason, done["broken"].error) == ("error", "ValueError: the grammar's own fault")
    assert engine.has_begun("broken")  # it waits no more
    assert len(done["sound"].tokens) == 3


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (AssertionError("remote code"), "engine_error", "remote code"),
        (torch.OutOfMemoryError("tried to allocate 9 GiB"), "out_of_memory", "9 GiB"),
        (torch.AcceleratorError("CUDA error: out of memory"), "out_of_memory", "out of memory"),
    ],
)
def test_a_forward_pass_that_fails_ends_its_requests_and_the_engine_goes_on(error, code, reason, tiny, prompt, alone):
    engine = Engine(tiny("qwen3"))

    def fails(*_):
        raise error

    hook = engine.model.hf.get_submodule("model.layers.1.mlp").register_forward_pre_hook(fails)
    try:
        failed = engine.generate([Request("a", prompt(5), 4), Request("b", prompt(9), 4)])
    finally:
        hook.remove()
    assert [(finished.reason, finished.code) for finished in failed] == [("error", code)] * 2
    assert all(reason in finished.error for finished in failed)
    (after,) = engine.generate([Request("c", prompt(5), 4)])
    assert list(after.tokens) == alone(engine.model, prompt(5), 4)


@pytest.mark.parametrize("decodes", [False, True])  # whether it fails in decodes alone
@pytest.mark.parametrize("name", ["qwen3", "qwen3_next"])
def test_a_request_that_fails_in_the_middle_of_a_forward_pass_ends_alone(name, decodes, tiny, prompt, alone):
    model, seen = tiny(name), []

    def note(_, args):
        seen[:] = args[0].flatten().tolist()

    def fails(*_):
        if 251 in seen and (not decodes or len(seen) <= 4):
            raise ValueError("this token's own fault")

    prompts = {str(i): prompt(6 + 9 * i, i) for i in range(4)}
    drawn = Sampling(0.0, logit_bias={251: 1000.0} if decodes else {})
    if not decodes:
        prompts["2"] = [*prompts["2"][:-1], 251]  # in its last chunk, after others have begun to decode
    want = {id: alone(model, ids, 6) for id, ids in prompts.items() if id != "2"}
    hooks = [
        model.hf.get_input_embeddings().register_forward_pre_hook(note),
        model.hf.get_submodule("model.layers.2.mlp").register_forward_pre_hook(fails),
    ]
    engine = Engine(model, prefill_tokens=16)
    try:
        requests = [Request(id, ids, 6, ignore_eos=True) for id, ids in prompts.items()]
        done = engine.generate([replace(one, sampling=drawn) if one.id == "2" else one for one in requests])
    finally:
        for hook in hooks:
            hook.remove()
    assert [one.reason for one in done] == ["length", "length", "error", "length"]
    assert {one.id: list(one.tokens) for one in done if one.id != "2"} == want


@pytest.mark.parametrize("piecewise", [False, True])
def test_a_broken_invariant_of_one_requests_rows_ends_its_recording_alone(
    piecewise, tiny, prompt, capturing, drain, endings
):
    model = tiny("qwen3")
    requests = [capturing(model, str(i), prompt(4 + i), 6, points=["layers.0.output"]) for i in range(2)]
    requests = [replace(request, ignore_eos=True) for request in requests]
    alone = Engine(model).generate(requests)
    engine = Engine(model, capture_bytes=1024 if piecewise else None)
    for request in requests:
        engine.submit(request)
    events = []
    while len(done := endings(events)) < len(requests):
        for event in engine.step():
            events.append(event)
            if isinstance(event, Rows):
                engine.written(event.id, event.captured.bytes)
        if engine.statistics.steps == 1:
            broken = next(seq for seq in engine._scheduler.running if seq.request.id == "0")
            engine._worker.finish()
            broken.recording._filled += 1  # a row that no forward brought
    assert [done[request.id].tokens for request in requests] == [want.tokens for want in alone]
    assert done["0"].captured is None
    assert "rows of" in done["0"].error
    assert done["1"].captured is not None


def test_an_engine_in_which_no_forward_pass_works_ends(tiny, prompt, drain):
    def run(chunks):
        raise AssertionError("a page is not there")

    engine = Engine(tiny("qwen3"))
    engine._runner.launch = FunctionType(run.__code__, {"__name__": "deployments.engine.runner"})  # as one of its own
    for number in range(2):
        engine.submit(Request(str(number), prompt(4), 4))
    assert {event.reason for event in drain(engine)} == {"error"}
    engine.submit(Request("last", prompt(4), 4))
    with pytest.raises(AssertionError, match="a page is not there"):
        drain(engine)


BROKEN = RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("error", [BROKEN, torch.AcceleratorError("CUDA error: device-side assert triggered")])
def test_a_broken_device_ends_the_engine(error, tiny, prompt, monkeypatch):
    engine = Engine(tiny("qwen3"))

    def fails(*_):
        raise error

    monkeypatch.setattr(torch.cuda, "synchronize", fails)  # a GPU that works would answer
    hook = engine.model.hf.register_forward_pre_hook(fails)
    try:
        with pytest.raises(type(error), match=str(error)):
            engine.generate([Request(str(number), prompt(4), 2) for number in range(3)])
    finally:
        hook.remove()


@pytest.mark.parametrize("thread", [False, True])
def test_a_device_that_breaks_while_rows_leave_it_ends_the_engine(thread, tiny, prompt, capturing, monkeypatch):
    engine = Engine(tiny("qwen3"), capture_thread=thread)
    request = capturing(engine.model, "a", prompt(4), 3, points=["layers.0.output"])

    def fails(*_):
        raise BROKEN

    monkeypatch.setattr(CaptureBuffer, "fill", fails)
    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.generate([request])


@pytest.mark.parametrize("name", ["qwen3", "qwen3_next"])
def test_a_forward_pass_launched_after_one_that_fails_leaves_no_rows(
    name, tiny, prompt, capturing, lone_values, assert_rows_close, monkeypatch
):
    calls, read = itertools.count(1), sampling.Choice.read

    def failing(choice):
        if next(calls) % 7 == 0:
            raise torch.OutOfMemoryError("Tried to allocate 9.00 GiB")
        return read(choice)

    model = tiny(name)
    engine = Engine(model, fixed_memory=True)
    recording = capturing(model, "rows", prompt(7), 2, points=["layers.*.output"])
    recording = replace(recording, ignore_eos=True)
    settings = [Sampling(0.1 + 0.1 * i, top_p=0.6, seed=i) for i in range(4)]
    drawn = [Request(str(i), prompt(5, i), 15, each, ignore_eos=True) for i, each in enumerate(settings)]
    want = Engine(model, fixed_memory=False).generate(drawn)
    monkeypatch.setattr(sampling.Choice, "read", failing)
    for together in ([recording], drawn, [recording], [*drawn, recording]):
        done = {one.id: one for one in engine.generate(together)}
        assert all(done[one.id].tokens == one.tokens for one in want if one.id in done)
        if recorded := done.get("rows"):
            for point, rows in lone_values(model, [*recording.prompt, *recorded.tokens], recording.points).items():
                assert_rows_close(recorded.captured.values[point], rows, point)
