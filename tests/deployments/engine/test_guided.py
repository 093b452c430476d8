"""Output under a grammar fits it, whatever the batch, the seed and the settings."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import replace
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.engine import sequence
from deployments.engine.engine import Engine
from deployments.engine.kv_memory import KvMemory
from deployments.engine.request import GRAMMAR_TOO_COMPLEX, GREEDY, Request, Sampling
from deployments.errors import RequestError

pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")
pytest.importorskip("re2")
import jsonschema
from llguidance import LLParserLimits

from deployments.chat.grammar import schema_rule, without_other_properties
from deployments.engine.decoding import guided as guided_module
from deployments.engine.decoding.guided import MOST_CHARACTERS, GrammarCompiler

PATIENCE = 20  # seconds until a test gives up on what never comes
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tall": {"type": "boolean"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS = {
    "person": PERSON,
    "choice": {"enum": ["red", "green", "a green that is light", 7, None]},
    "list": {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 9}, "minItems": 1, "maxItems": 3},
    "either": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/pair"}], "$defs": {"pair": PERSON}},
    "pattern": {"type": "string", "pattern": "^[a-c]{2,4}-[0-9]{2}$"},
}


def grammar(model, schema):
    return GrammarCompiler(model).compile(f"start: {schema_rule(schema)}", "response_format")


@pytest.fixture(scope="module", params=["demo", "llama", "gpt2"])
def model(request, tiny, demo):
    return demo if request.param == "demo" else tiny(request.param)


@pytest.fixture(scope="module")
def compiled(model):
    return {name: grammar(model, schema) for name, schema in SCHEMAS.items()}


@pytest.fixture(scope="module")
def of_demo(demo):
    return {name: grammar(demo, schema) for name, schema in SCHEMAS.items()}


def said(model, finished):
    """The text of a request that ended."""
    tokens = [token for token in finished.tokens if token not in model.eos]
    return model.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)


def test_whatever_the_settings_a_text_that_stops_obeys_its_schema(model, compiled):
    numbers = random.Random(0)
    stopped = dict.fromkeys(SCHEMAS, 0)
    wanted = []
    for seed in range(6):
        for name in SCHEMAS:
            sampling = Sampling(
                temperature=numbers.choice([0.0, 0.7, 1.5]),
                top_p=numbers.choice([1.0, 0.9]),
                top_k=numbers.choice([0, 5]),
                seed=seed,
                repetition_penalty=numbers.choice([1.0, 1.3]),
                min_tokens=numbers.choice([0, 4]),
            )
            prompt = [numbers.randrange(3, 256) for _ in range(numbers.randrange(1, 9))]
            wanted.append(Request(f"{name} {seed}", prompt, 80, sampling=sampling, grammar=compiled[name]))
    for request, finished in zip(wanted, Engine(model).generate(wanted), strict=True):
        assert finished.reason in ("stop", "length"), finished.error
        if finished.reason == "stop":
            name, _ = request.id.split()
            jsonschema.validate(json.loads(said(model, finished)), SCHEMAS[name])
            stopped[name] += 1
    assert all(stopped.values()), stopped


@given(st.sampled_from(sorted(SCHEMAS)), st.randoms(use_true_random=False))
def test_the_end_is_allowed_exactly_where_the_text_is_complete(demo, of_demo, name, numbers):
    stand = of_demo[name].begin()
    tokens, ends = [], sorted(demo.eos)
    for _ in range(60):
        allowed = stand.allowed()
        text = demo.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        assert all(bool(allowed[end]) == _obeys(text, SCHEMAS[name]) for end in ends), text
        going_on = [token for token in allowed.nonzero()[0].tolist() if token not in demo.eos]
        if not going_on:
            break
        tokens.append(numbers.choice(going_on))
        stand.add(tokens[-1])
    assert stand.error is None


def _obeys(text, schema):
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def test_greedy_neighbours_of_guided_rows_get_the_tokens_they_get_alone(model, compiled, prompt, alone, same_greedy):
    prompts = [prompt(length) for length in (3, 7, 12)]
    free = [Request(f"free {i}", ids, 20) for i, ids in enumerate(prompts)]
    guided = [
        Request(name, prompt(5, i), 40, sampling=Sampling(seed=i), grammar=compiled[name])
        for i, name in enumerate(SCHEMAS)
    ]
    done = Engine(model).generate([guided[0], free[0], *guided[1:3], free[1], *guided[3:], free[2]])
    by_id = {finished.id: finished for finished in done}
    for request in free:
        assert same_greedy(model, request.prompt, by_id[request.id].tokens, alone(model, request.prompt, 20))


def test_a_guided_row_that_is_preempted_or_run_in_chunks_says_the_same(demo, prompt, drain, endings, monkeypatch):
    monkeypatch.setattr(sequence, "RESERVED_TOKENS", 1)  # so that they come to want more than there is
    position = KvMemory(demo, 1, kv_bytes=1).position_bytes
    schema = grammar(demo, {"type": "array", "items": PERSON, "minItems": 40})
    asked = [
        Request(str(i), prompt(length), 90, sampling=Sampling(seed=i, temperature=0.8), grammar=schema)
        for i, length in enumerate((82, 70, 30))
    ]
    tight, roomy = Engine(demo, prefill_tokens=64, kv_bytes=256 * position), Engine(demo)
    for request in asked:
        tight.submit(request)
        roomy.submit(request)
    got, want = endings(drain(tight)), endings(drain(roomy))
    assert tight.statistics.preempted > 0
    assert {id: one.tokens for id, one in got.items()} == {id: one.tokens for id, one in want.items()}


def test_a_text_that_is_cut_off_ends_with_length(demo, prompt):
    schema = {"type": "string", "minLength": 200}
    (finished,) = Engine(demo).generate([Request("cut", prompt(4), 10, grammar=grammar(demo, schema))])
    assert finished.reason == "length"
    assert said(demo, finished).startswith('"')


def test_a_grammar_goes_before_min_tokens(demo, prompt):
    wanted = Request(
        "short", prompt(4), 20, Sampling(temperature=0, min_tokens=20), grammar=grammar(demo, {"const": 1})
    )
    (finished,) = Engine(demo).generate([wanted])
    assert (finished.reason, said(demo, finished)) == ("stop", "1")
    numbers = {"type": "array", "items": {"const": 1}}
    wanted = Request("long", prompt(4), 60, Sampling(seed=1, min_tokens=20), grammar=grammar(demo, numbers))
    (finished,) = Engine(demo).generate([wanted])
    assert len(finished.tokens) > 20  # there is always another number


def test_bias_stop_strings_and_logprobs_go_on_working(demo, prompt):
    schema = grammar(demo, {"enum": ["left", "right"]})
    (right,) = demo.tokenizer("r", add_special_tokens=False)["input_ids"]
    biased = Sampling(temperature=0, logit_bias={right: 100.0})
    requests = [
        Request("biased", prompt(4), 20, sampling=biased, grammar=schema, logprobs=2),
        Request("stopped", prompt(4), 20, sampling=biased, grammar=schema, stop=("gh",), streamed=False),
    ]
    biased, stopped = Engine(demo).generate(requests)
    assert said(demo, biased) == '"right"'
    assert (stopped.reason, stopped.rest.text) == ("stop", '"ri')


def test_end_tokens_cannot_be_ignored_under_a_grammar(demo, prompt):
    request = Request("on", prompt(4), 8, sampling=GREEDY, ignore_eos=True, grammar=grammar(demo, PERSON))
    with pytest.raises(RequestError) as refused:
        Engine(demo).check(request)
    assert refused.value.field == "ignore_eos"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "spoon"},
        {"type": "object", "properties": 3},
        {"$ref": "https://example.com/schema.json"},
        {"$ref": "#/$defs/none"},
        {"type": "string", "pattern": "(?<=a)b"},
        {"type": "string", "pattern": "("},
        {"type": "string", "format": "no-such-format"},
        {"not": {"type": "string"}},
        {"enum": ["x" * MOST_CHARACTERS]},
        {"$ref": "#/$defs/loop", "$defs": {"loop": {"$ref": "#/$defs/loop"}}},
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1500)}},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(demo, schema):
    with pytest.raises(RequestError) as refused:
        grammar(demo, schema)
    assert refused.value.field == "response_format"
    assert refused.value.message
    assert len(refused.value.message) < 1000


def limited(monkeypatch, model, states):
    """A grammar of more and more lexer states, of which it may have so many."""
    monkeypatch.setattr(guided_module, "LIMITS", LLParserLimits(max_lexer_states=states))
    return grammar(model, {"type": "string", "pattern": "^[ab]*a[ab]{24}$"})


def test_a_row_whose_grammar_fails_on_the_way_ends_alone_and_says_why(demo, prompt, alone, same_greedy, monkeypatch):
    request = Request("free", prompt(4), 40)
    doomed = Request("doomed", prompt(5), 400, sampling=Sampling(seed=0), grammar=limited(monkeypatch, demo, 100))
    free, failed = Engine(demo).generate([request, doomed])
    assert (failed.reason, failed.code) == ("error", GRAMMAR_TOO_COMPLEX)
    assert "states" in failed.error
    assert same_greedy(demo, request.prompt, free.tokens, alone(demo, request.prompt, 40))


def test_rows_of_one_grammar_do_not_use_up_each_others_states(demo, prompt, monkeypatch):
    shared = limited(monkeypatch, demo, 300)
    ends = [id for text, id in demo.tokenizer.get_vocab().items() if '"' in text]  # the text is to go on
    bias = dict.fromkeys(ends, -100.0)
    seeds = iter(range(60))
    while not shared.worn and (few := list(islice(seeds, 10))):
        settings = [Sampling(seed=seed, logit_bias=bias) for seed in few]
        rows = [Request(str(sampling.seed), prompt(5), 60, sampling, grammar=shared) for sampling in settings]
        for finished in Engine(demo).generate(rows):
            assert finished.reason in ("stop", "length"), finished.error
    assert shared.worn


def use_up(model, shared):
    """Have a grammar's rows learn as many states as they may."""
    numbers = random.Random(0)
    while not shared.worn:
        row = shared.begin()
        for _ in range(60):
            going_on = set(row.allowed().nonzero()[0].tolist()) - model.eos
            if not going_on:
                break
            row.add(numbers.choice(sorted(going_on)))


def test_while_a_grammar_is_compiled_anew_other_rows_go_on(demo, prompt, capturing, endings, monkeypatch):
    shared = limited(monkeypatch, demo, 300)
    use_up(demo, shared)
    sampling = Sampling(seed=1, temperature=1.5)
    guided = capturing(demo, "guided", prompt(5), 60, points=["layers.0.output"])
    guided = replace(guided, sampling=sampling, grammar=shared)
    (want,) = Engine(demo).generate([guided])
    make, compiles = shared.make, threading.Event()

    def make_later():
        assert compiles.wait(PATIENCE)
        return make()

    monkeypatch.setattr(shared, "make", make_later)
    engine = Engine(demo)
    engine.submit(guided)
    engine.submit(Request("free", prompt(4), 90, ignore_eos=True))
    events = []
    while not (free := endings(events)):
        events += engine.step()
    assert free.keys() == {"free"}
    assert engine.step() == []  # nothing can run
    compiles.set()
    while "guided" not in (done := endings(events)):
        events += engine.step(wait=True)
    got = done["guided"]
    assert got.tokens == want.tokens
    assert got.captured.positions == want.captured.positions
    torch.testing.assert_close(got.captured.values, want.captured.values)


OPEN = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
AS_THEY_ARE = [
    {"type": "object"},
    {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
    {"type": "object", "properties": {"a": {}}, "required": ["b"]},
    {"allOf": [OPEN, {"type": "object", "properties": {"b": {}}, "required": ["b"]}]},
    {"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["b"]}, {"required": ["c"]}]},
    {"enum": [{"properties": {"a": 1}}]},
]


def test_an_object_has_the_properties_that_are_named_and_no_others(demo):
    nested = {"type": "object", "properties": {"x": {"type": "array", "items": {"$ref": "#/$defs/o"}}}}
    told = without_other_properties({**nested, "$defs": {"o": OPEN}})
    assert told["additionalProperties"] is False
    assert told["$defs"]["o"]["additionalProperties"] is False
    request = Request("a", demo.tokenizer("Tom has 3")["input_ids"], 200, grammar=grammar(demo, OPEN))
    (finished,) = Engine(demo).generate([request])
    assert finished.reason == "stop"
    assert json.loads(said(demo, finished)).keys() == {"a"}


@pytest.mark.parametrize("schema", AS_THEY_ARE, ids=str)
def test_what_would_not_be_obeyed_any_more_stays_as_it_is(schema):
    assert without_other_properties(schema) == schema
