"""A replica reports a dead or stuck engine to Serve, and leaves nothing running when it ends."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import threading
from types import SimpleNamespace

import pytest

from deployments.accounts import Account
from deployments.chat.prompts import Prompts
from deployments.engine.request import GREEDY
from deployments.job import Job, Text
from deployments.messages import ENGINE_ENDED, NOT_TAKEN, End, Refusal
from deployments.options import Options
from deployments.points.capture import Capture
from deployments.points.logit_lens import LogitLens
from deployments.points.placement import AnswerReasoning
from deployments.replica import runs
from deployments.replica.replica import MOST_TEXTS, ModelReplica
from tests.waiting import wait_until

Replica = ModelReplica.func_or_class  # the class beneath the deployment


@pytest.fixture
def serve():
    """`serve(**options)`: a replica; at the end of the test it ends its thread."""
    made = []

    def replica(**options):
        made.append(Replica(Options(dtype="float32", threads=1, **options), store=object()))
        return made[-1]

    yield replica
    for each in made:
        each.__del__()
        assert not each._thread.is_alive()


@pytest.fixture
def replica(serve):
    return serve()


def held(replica):
    """Hold the next forward: an event that it sets when it begins, and what lets it and all later ones go on."""
    entered, released = threading.Event(), threading.Event()

    def hold(*_):
        entered.set()
        released.wait(60)

    hook = replica._model.hf.register_forward_pre_hook(hold)

    def go_on():
        hook.remove()
        released.set()

    return entered, go_on


def job(**fields):
    return Job(**{"id": "job", "prompts": ["Tom has 3 boxes."], "max_tokens": 4, "sampling": GREEDY} | fields)


def test_each_choice_has_the_rows_and_the_lens_of_its_own_reasoning(replica, monkeypatch):
    def even(prompts, job, prompt):
        return AnswerReasoning(lambda token: token % 2 == 0, len(prompt.ids))

    monkeypatch.setattr(Prompts, "reasoning", even)
    capture = Capture.model_validate({"points": ["norm.output"], "tokens": "reasoning", "return": "inline"})
    lens = LogitLens(layers=[0], tokens="reasoning")
    chat = {"messages": [{"role": "user", "content": "Tom has 3 boxes."}], "prompts": [], "max_tokens": 12, "n": 2}
    ends = asyncio.run(replica.complete(job(capture=capture, logit_lens=lens, token_ids=True, **chat)))
    for end in ends:
        at = [end.prompt_tokens + i for i, token in enumerate(end.piece.token_ids) if token % 2 == 0]
        assert [entry["position"] for entry in end.piece.lens] == at
        assert end.run.points["norm.output"]["shape"][0] == len(at) > 1


def test_a_stop_string_that_is_a_special_token_ends_an_answer(replica):
    special = "<|im_start|>"
    id = replica._model.tokenizer.convert_tokens_to_ids(special)
    forced = dataclasses.replace(GREEDY, logit_bias={id: 100.0})
    end = asyncio.run(replica.complete(job(stop=("x", special), sampling=forced)))[-1]
    assert (end.finish_reason, end.completion_tokens) == ("stop", 1)


def test_it_exports_that_nothing_runs_any_more_before_the_next_health_check(replica, monkeypatch):
    exported = set()
    monkeypatch.setattr(replica._metrics, "update", lambda now: exported.add((now.running, now.waiting)))
    asyncio.run(replica.complete(job()))
    assert exported == {(0, 0)}


def test_a_dead_engine_fails_the_health_check_and_who_waits_is_told(replica):
    def broken():
        raise AssertionError("a broken invariant")

    replica._engine._note = broken
    # The thread's death is the point; pytest would count it as an error of the test.
    threading.excepthook, kept = lambda _: None, threading.excepthook
    try:
        messages = asyncio.run(replica.complete(job()))
        replica._thread.join(timeout=30)
    finally:
        threading.excepthook = kept
    assert isinstance(messages[-1], Refusal)
    assert messages[-1].status == 503
    with pytest.raises(RuntimeError, match="thread has ended"):
        replica.check_health()


def test_a_job_that_comes_before_the_process_of_a_dead_engine_ends_was_not_begun(replica, monkeypatch):
    def broken():
        raise AssertionError("a broken invariant")

    async def both():
        return [(await replica.complete(job(id=name)))[-1].message for name in ("first", "later")]

    ends = threading.Event()
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_actor_id=lambda: "actor"))
    monkeypatch.setattr(replica, "_exit", lambda: ends.wait(60))
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    replica._engine._note = broken
    try:
        assert asyncio.run(both()) == [ENGINE_ENDED, NOT_TAKEN]
    finally:
        ends.set()
        replica._thread.join(timeout=30)


def test_a_request_whose_answer_cannot_be_read_fails_alone(replica):
    class Unreadable:
        def add(self, text):
            raise AttributeError("a parser's own fault")

    def with_reader(choices, made):
        return {id: dataclasses.replace(choice, reader=made) for id, choice in choices.items()}

    preparation = replica._preparation
    choose = preparation._choices
    preparation._choices = lambda asked, *more: (
        with_reader(choose(asked, *more), Unreadable()) if asked.id == "unreadable" else choose(asked, *more)
    )

    async def both():
        return await asyncio.gather(replica.complete(job(id="unreadable")), replica.complete(job(id="other")))

    unreadable, other = asyncio.run(both())
    assert (unreadable[-1].status, unreadable[-1].code) == (500, "internal_error")
    assert isinstance(other[-1], End)


def test_a_requests_memory_is_in_the_log_whether_its_client_waits_or_goes(replica, caplog):
    async def both():
        kept = await replica.complete(job(request_id="kept"))
        stream = replica.stream(job(id="left", request_id="left", max_tokens=2000, ignore_eos=True))
        await anext(stream)
        await stream.aclose()
        await wait_until(lambda: any("(left)" in line for line in caplog.messages))
        return kept

    with caplog.at_level("INFO", logger="ray.serve"):
        asyncio.run(both())
    said = {name: next(line for line in caplog.messages if f"({name})" in line) for name in ("kept", "left")}
    for line in said.values():
        numbers = re.search(r"memory before ([\d.]+) MiB, peak ([\d.]+) MiB, after ([\d.]+) MiB", line)
        assert numbers is not None, line
        before, peak, after = map(float, numbers.groups())
        assert min(before, after) > 0
        assert peak > max(before, after) - 256  # other threads of the process take and release memory, too
    assert "cancelled" in said["left"]


def test_a_capture_whose_choices_are_together_beyond_the_limit_is_refused_with_the_numbers(serve):
    small = serve(max_capture_bytes=192 * 4 * 9)
    one = job(capture=Capture(**{"points": ["norm.output"], "tokens": "generated", "return": "inline"}))
    assert isinstance(asyncio.run(small.complete(one))[-1], End)
    refused = asyncio.run(small.complete(dataclasses.replace(one, n=3)))[-1]
    assert (refused.field, refused.code) == ("capture", "capture_too_large")
    assert str(192 * 4 * 9) in refused.message


def test_an_inline_answer_counts_the_rows_it_returns(monkeypatch, serve):
    monkeypatch.setattr(runs, "MOST_INLINE_VALUES", 192 * 8)
    tight = serve()
    inline = {"points": ["norm.output"], "return": "inline"}
    few = job(max_tokens=100, capture=Capture(**inline, tokens="prompt"))
    assert isinstance(asyncio.run(tight.complete(few))[-1], End)
    many = job(max_tokens=100, capture=Capture(**inline))
    assert asyncio.run(tight.complete(many))[-1].field == "capture.return"


def test_a_stuck_engine_fails_the_health_check(monkeypatch, serve):
    monkeypatch.setattr("deployments.replica.replica.STUCK_AFTER_S", 0.01)
    replica = serve()
    entered, go_on = held(replica)

    def unhealthy() -> bool:
        try:
            replica.check_health()
        except RuntimeError as error:
            return "in one step" in str(error)
        return False

    async def ask():
        waiting = asyncio.ensure_future(replica.complete(job()))
        await asyncio.to_thread(entered.wait, 60)
        await wait_until(unhealthy)
        go_on()
        return await waiting

    assert isinstance(asyncio.run(ask())[-1], End)


def test_a_job_past_its_time_gets_504_and_frees_its_slot(serve):
    replica = serve(request_timeout_s=2)

    async def ask():
        whole = await replica.complete(job(max_tokens=4000, ignore_eos=True))
        await wait_until(lambda: not replica._engine.statistics.running)
        stream = replica.stream(job(max_tokens=4000, ignore_eos=True))
        streamed = [message async for gathered in stream for message in gathered]
        await wait_until(lambda: not replica._engine.statistics.running)
        return whole[-1], streamed

    whole, (*pieces, last) = asyncio.run(ask())
    assert (whole.status, whole.code) == (504, "timeout")
    assert last == whole
    assert pieces


def test_a_job_that_no_forward_took_in_its_time_says_so(serve):
    replica = serve(request_timeout_s=3)
    entered, go_on = held(replica)

    async def both():
        begun = asyncio.ensure_future(replica.complete(job(max_tokens=4000, ignore_eos=True)))
        await asyncio.to_thread(entered.wait, 60)
        ended = await asyncio.gather(begun, replica.complete(job(id="second")))
        go_on()
        return [(refusal.status, refusal.code) for *_, refusal in ended]

    assert asyncio.run(both()) == [(504, "timeout"), (504, "not_started")]


def test_more_requests_than_places_get_429_and_one_that_is_too_large_for_them_400(serve):
    full = serve(max_running=1, max_queued=1)

    async def both():
        first = full.stream(job(n=2, max_tokens=4000, ignore_eos=True))
        await anext(first)
        refused = await full.complete(job(id="second"))
        never = await full.complete(job(id="third", n=3))
        await first.aclose()
        await wait_until(lambda: not full._engine.statistics.running)
        return refused[-1], never[-1]

    refused, never = asyncio.run(both())
    assert (refused.status, refused.code) == (429, "server_busy")
    assert (never.status, never.field) == (400, "n")


def test_one_owner_takes_no_more_places_than_it_leaves(serve):
    replica = serve(max_running=1, max_queued=7)

    def of(owner, **fields):
        return job(id=owner, account=Account(owner, is_admin=False), **fields)

    async def both():
        first = replica.stream(of("a", n=4, max_tokens=4000, ignore_eos=True))
        await anext(first)
        refused, other = await replica.complete(of("a")), replica.stream(of("b", n=4))
        await first.aclose()
        return refused[-1], [message async for gathered in other for message in gathered]

    refused, others = asyncio.run(both())
    assert (refused.status, refused.code) == (429, "server_busy")
    assert sum(isinstance(message, End) for message in others) == 4


def test_texts_to_tokenize_keep_no_generation_waiting_and_too_many_get_429(replica):
    entered, go_on = threading.Semaphore(0), threading.Event()
    tokenize = replica._prompts.tokenize

    def slow(text):
        entered.release()
        go_on.wait(60)
        return tokenize(text)

    replica._prompts.tokenize = slow

    async def ask():
        texts = [asyncio.ensure_future(replica.tokenize(Text("Tom"))) for _ in range(MOST_TEXTS)]
        await asyncio.to_thread(entered.acquire, timeout=60)
        refused = [await replica.tokenize(Text("Tom")), await replica.detokenize([1])]
        generated = await replica.complete(job())
        go_on.set()
        answers = await asyncio.gather(*texts)
        return refused, generated, answers, await replica.detokenize(answers[0]["tokens"])

    refused, generated, answers, text = asyncio.run(ask())
    assert {(one.status, one.code) for one in refused} == {(429, "server_busy")}
    assert isinstance(generated[-1], End)
    assert {answer["count"] for answer in answers} == {len(answers[0]["tokens"])}
    assert text == {"prompt": "Tom"}
