"""The engine on its own thread: any thread submits, one receives events, `stop` ends it."""

import queue
import threading

import pytest

from deployments.engine.engine import Engine
from deployments.engine.request import Finished, Request

PATIENCE = 60  # seconds until a test gives up on what never comes


@pytest.fixture
def running(tiny):
    """An engine that runs on a thread, and the queue its events go to."""
    engine, events = Engine(tiny("qwen3"), max_running=3), queue.Queue()

    def emit(batch):
        for event in batch:
            events.put(event)

    thread = threading.Thread(target=engine.run, args=(emit,))
    thread.start()
    yield engine, events
    engine.stop()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def wait_for_ends(events, count):
    done = {}
    while len(done) < count:
        event = events.get(timeout=PATIENCE)
        if isinstance(event, Finished):
            done[event.id] = event
    return done


def test_requests_from_many_threads_all_end_with_their_own_tokens(running, tiny, prompt, alone, same_greedy):
    engine, events = running
    model = tiny("qwen3")
    requests = [Request(str(i), prompt(2 + i), 8) for i in range(12)]
    wants = [alone(model, request.prompt, 8) for request in requests]
    senders = [threading.Thread(target=engine.submit, args=(request,)) for request in requests]
    for sender in senders:
        sender.start()
    done = wait_for_ends(events, 12)
    for request, want in zip(requests, wants, strict=True):
        assert same_greedy(model, request.prompt, done[request.id].tokens, want)


def test_an_idle_engine_takes_up_work_again(running, prompt):
    engine, events = running
    for i in range(3):
        engine.submit(Request(str(i), prompt(4), 2))
        assert wait_for_ends(events, 1).keys() == {str(i)}


def test_a_request_is_cancelled_from_another_thread(running, tiny, prompt):
    engine, events = running
    engine.cancel("nobody")  # while it is idle
    cancelled = threading.Event()
    hook = tiny("qwen3").hf.register_forward_pre_hook(lambda *_: cancelled.wait(PATIENCE) and None)
    engine.submit(Request("a", prompt(4), 90, ignore_eos=True))
    engine.cancel("a")
    cancelled.set()
    finished = wait_for_ends(events, 1)["a"]
    hook.remove()
    assert finished.reason == "cancelled"


def test_stop_returns_in_the_middle_of_work(tiny, prompt):
    engine, started = Engine(tiny("qwen3")), threading.Event()
    thread = threading.Thread(target=engine.run, args=(lambda _: started.set(),))
    thread.start()
    engine.submit(Request("a", prompt(4), 90, ignore_eos=True))
    assert started.wait(PATIENCE)
    engine.stop()
    thread.join(PATIENCE)
    assert not thread.is_alive()
