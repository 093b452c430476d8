"""Tokens and text do not depend on the other requests in the batch."""

import random

from deployments.engine.engine import Engine
from deployments.engine.request import Delta, Request

LENGTHS = [random.Random(7).randrange(1, 70) for _ in range(32)]


def serve_in_waves(engine, requests, drain):
    """Submit at random moments, so that requests join and leave all the time."""
    numbers = random.Random(3)
    events = []
    for request in requests:
        engine.check(request)
        engine.submit(request)
        for _ in range(numbers.choice([0, 0, 1, 3])):
            events += engine.step()
    return events + drain(engine)


def test_the_model_that_ships_gives_generates_tokens_for_32_prompts_of_mixed_length(
    demo, prompt, alone, same_greedy, capturing, drain, endings
):
    model = demo
    numbers = random.Random(1)
    requests = []
    for i, length in enumerate(LENGTHS):
        new = numbers.randrange(1, 26)
        if i % 3:
            requests.append(Request(str(i), prompt(length, i), new))
        else:
            requests.append(capturing(model, str(i), prompt(length, i), new, points=["layers.1.output"]))
    done = endings(serve_in_waves(Engine(model, max_running=5), requests, drain))
    assert len(done) == 32
    for request in requests:
        want = alone(model, request.prompt, request.max_tokens)
        finished = done[request.id]
        assert same_greedy(model, request.prompt, finished.tokens, want)
        ended = finished.tokens[-1] in model.eos
        assert finished.reason == ("stop" if ended else "length")
        assert ended or len(finished.tokens) == request.max_tokens


def test_deltas_add_up_to_the_tokens_and_their_text(demo, prompt, drain, endings):
    requests = [Request(str(i), demo.tokenizer(text)["input_ids"], 30) for i, text in enumerate(["Tom has", "é", "12"])]
    requests += [Request("random", prompt(9), 30)]
    engine = Engine(demo)
    for request in requests:
        engine.submit(request)
    events = drain(engine)
    for id, finished in endings(events).items():
        deltas = [event for event in events if isinstance(event, Delta) and event.id == id]
        assert [token for delta in deltas for token in delta.tokens] == list(finished.tokens)
        whole = demo.tokenizer.decode(finished.tokens, skip_special_tokens=True)
        assert "".join(delta.text for delta in deltas) == whole


def test_an_end_token_ends_the_text_unless_it_is_to_be_ignored(tiny, ending_prompt):
    model = tiny("qwen3")
    stopped, went_on = Engine(model).generate(
        [Request("stops", ending_prompt, 20), Request("ignores", ending_prompt, 20, ignore_eos=True)]
    )
    assert (stopped.reason, went_on.reason) == ("stop", "length")
    assert stopped.tokens[-1] in model.eos
    assert len(went_on.tokens) == 20
    assert list(went_on.tokens[: len(stopped.tokens)]) == list(stopped.tokens)


def test_no_forward_takes_more_prompt_tokens_than_set(tiny, prompt, capturing):
    model, sizes = tiny("qwen3"), []
    hook = model.hf.get_input_embeddings().register_forward_pre_hook(lambda _, args: sizes.append(args[0].numel()))
    plain = [Request(str(length), prompt(length), 8) for length in (40, 3, 2, 9, 5)]
    recording = [capturing(model, f"r{length}", prompt(length), 8, points=["norm.output"]) for length in (30, 4, 2)]
    try:
        Engine(model, prefill_tokens=12, capture_bytes=1 << 16).generate([*plain, *recording])
    finally:
        hook.remove()
    decoding = len(plain) + len(recording)
    assert 12 <= max(sizes) < 12 + decoding
