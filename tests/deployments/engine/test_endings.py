"""What ends a text, and what does not before min_tokens: end tokens, stop token ids, stop strings."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.engine.engine import Engine
from deployments.engine.request import Delta, Request, Sampling

NEW = 24


def run(model, request, drain, endings):
    """(its last event, its text)."""
    engine = Engine(model)
    engine.check(request)
    engine.submit(request)
    events = drain(engine)
    return endings(events)[request.id], "".join(event.text for event in events if isinstance(event, Delta))


def test_an_end_token_ends_the_text_unless_it_is_to_be_ignored(tiny, ending_prompt):
    model = tiny("qwen3")
    stopped, went_on = Engine(model).generate(
        [Request("stops", ending_prompt, 20), Request("ignores", ending_prompt, 20, ignore_eos=True)]
    )
    assert (stopped.reason, went_on.reason) == ("stop", "length")
    assert stopped.tokens[-1] in model.eos
    assert len(went_on.tokens) == 20
    assert list(went_on.tokens[: len(stopped.tokens)]) == list(stopped.tokens)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_token_id_ends_the_text_before_it(ignore_eos, demo, drain, endings):
    ids = demo.tokenizer("Tom has 3 apples and")["input_ids"]
    whole, _ = run(demo, Request("whole", ids, NEW, ignore_eos=True), drain, endings)
    stop = whole.tokens[8]
    first = list(whole.tokens).index(stop)
    request = Request("a", ids, NEW, stop_token_ids=(stop, 5), ignore_eos=ignore_eos)
    finished, text = run(demo, request, drain, endings)
    assert finished.reason == "stop"
    assert list(finished.tokens) == list(whole.tokens[: first + 1])
    assert text == demo.tokenizer.decode(whole.tokens[:first], skip_special_tokens=True)


def test_the_token_that_makes_min_tokens_full_may_complete_a_stop_string(demo, drain, endings):
    ids = demo.tokenizer("Tom has 3 apples and")["input_ids"]
    whole, _ = run(demo, Request("whole", ids, NEW, ignore_eos=True), drain, endings)
    texts = [demo.tokenizer.decode(whole.tokens[:count]) for count in range(NEW)]
    least = next(count for count in range(1, NEW) if texts[count][-1] not in texts[count - 1])
    stop = texts[least][-1]
    for min_tokens, ends in ((least, True), (least + 1, False)):
        request = Request("a", ids, NEW, Sampling(0.0, min_tokens=min_tokens), stop=(stop,), ignore_eos=True)
        finished, text = run(demo, request, drain, endings)
        assert (len(finished.tokens) == least) == ends
        assert (text == texts[least][:-1]) == ends


requests = st.builds(
    lambda seed, stop, ids, least, temperature: Request(
        "a",
        [40, 41, 200],
        NEW,
        Sampling(temperature, seed=seed, min_tokens=least, logit_bias={100: 2.0, 161: 2.0, 162: 2.0}),
        stop=tuple(stop),
        stop_token_ids=tuple(ids),
    ),
    st.integers(0, 9999),
    st.lists(st.text("abcABC123 é", min_size=1, max_size=2), max_size=4),
    st.lists(st.integers(0, 255), max_size=6),
    st.integers(0, NEW),
    st.sampled_from([0.0, 1.0, 3.0]),
)


@settings(max_examples=settings().max_examples // 2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(request_=requests)
def test_whatever_ends_a_text_none_of_it_is_shown_and_none_of_it_comes_too_early(request_, tiny, drain, endings):
    model = tiny("qwen3")
    finished, text = run(model, request_, drain, endings)
    tokens, ends = list(finished.tokens), model.eos | set(request_.stop_token_ids)
    least = request_.sampling.min_tokens
    assert not ends & set(tokens[:least])
    assert not ends & set(tokens[:-1])
    assert len(tokens) >= least
    by_token = tokens[-1] in ends
    shown = model.tokenizer.decode(tokens[:-1] if by_token else tokens)
    assert shown.startswith(text)
    if text != shown:
        assert finished.reason == "stop"
        assert any(shown[len(text) :].startswith(stop) for stop in request_.stop)
    else:
        assert finished.reason == ("stop" if by_token else "length")
    if not least:
        assert not any(stop in text for stop in request_.stop)
