"""Readouts in the engine: values equal those computed offline, gates open where they should, in any batch."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from deployments.conditions import Condition
from deployments.engine.engine import Engine
from deployments.engine.request import Delta, Finished, PromptLogprobs, Request
from deployments.model.model import Model
from deployments.points.capture import Capture
from deployments.points.interventions import Interventions
from deployments.readouts.files import define
from deployments.readouts.resolver import ReadoutResolver
from deployments.readouts.spec import AskedReadouts, ReadoutRows
from deployments.readouts.values import Readout
from tests.deployments.conftest import DEVICE

pytest.importorskip("ray")
from deployments.interventions.resolve import EditResolver
from deployments.interventions.stored_tensors import FetchedTensors

sys.path.append(str(Path(__file__).parent.parent / "readouts"))  # importlib mode adds no folder
from saes_by_hand import linear, sae

NONE = FetchedTensors({}, {})


@pytest.fixture
def model(tiny):
    """A small one of random weights."""
    return tiny("qwen3")


@pytest.fixture(scope="module")
def invariant(build, byte_tokenizer):
    """A model whose sequences have the same bits in any company."""
    return Model(build("qwen3", max_position_embeddings=512), byte_tokenizer, "qwen3", batch_invariant=True)


@functools.cache
def held(hidden: int, batch_invariant: bool = False, device: str = DEVICE) -> dict[str, Readout]:
    """Readouts of a model whose rows have so many entries."""
    on, last = torch.device(device), "layers.1.output"
    files = {
        "early": linear(hidden, point="layers.0.output", activation="none"),
        "mid": linear(hidden, 3, seed=1, point="layers.0.output", activation="none"),
        "late": linear(hidden, seed=2, point=last, activation="none"),
        "sae": sae(hidden, 64, "topk", point="layers.0.output"),
        "relu": sae(hidden, 96, point=last),
    }
    return {name: Readout(define(data, {"name": name}), on, batch_invariant) for name, data in files.items()}


def request(
    model, id: str, prompt: list[int], new: int, readouts: Any = (), changes: Any = (), stop: Any = None, **more: Any
) -> Request:
    """A request with readouts, as a replica makes it."""
    asked = TypeAdapter(AskedReadouts).validate_python(list(readouts))
    specs = TypeAdapter(Interventions).validate_python(list(changes))
    hidden = model.points.named("layers.0.output", "")[0].shape[-1]
    used = ReadoutResolver.of(model.points, held(hidden, model.batch_invariant), asked)
    fields = {f"interventions[{i}]": spec for i, spec in enumerate(specs)}
    resolver = EditResolver(model.points, model.device, fields, NONE, used, report=True)
    ends = lambda: ("", [])  # noqa: E731
    most = len(prompt) + new
    stopping = used.stop(Condition.model_validate(stop), len(prompt)) if stop else None
    capture = Capture.model_validate(more.pop("capture")) if "capture" in more else None
    return Request(
        id,
        prompt,
        new,
        readouts=used.values(len(prompt), most, ends),
        edits=resolver.of(fields, len(prompt), most, ends),
        stop_when=stopping,
        capture=capture,
        points=model.points.resolve(capture) if capture else (),
        **{"ignore_eos": True} | more,
    )


def positions_of(part: ReadoutRows, prompt: int) -> list[int]:
    return [index + prompt * part.generated for index in part.index]


def rows_of(done: Finished, number: int = 0) -> dict[int, Any]:
    """Values of a readout by position; of features, (number, value)."""
    found: dict[int, Any] = {}
    name = list(dict.fromkeys(part.name for part in done.readouts))[number]
    for part in done.readouts:
        if part.name == name:
            for i, (position, values) in enumerate(zip(positions_of(part, len(done.prompt)), part.values, strict=True)):
                found[position] = values if part.features is None else dict(zip(part.features[i], values, strict=True))
    return found


PROMPT = [5, 9, 17, 33, 65, 129, 7, 11]
ALL = {"points": ["layers.0.output", "layers.1.output"], "dtype": "float32"}


def test_values_are_those_of_the_offline_probe_on_the_captured_rows(model) -> None:
    (done,) = Engine(model).generate([request(model, "a", PROMPT, 6, ["early", "mid", "late", "sae"], capture=ALL)])
    assert done.captured is not None
    captured = done.captured.values
    readouts = held(model.points.named("embed.output", "")[0].shape[-1], device="cpu")
    for number, (name, point) in enumerate([("early", 0), ("mid", 0), ("late", 1)]):
        want = readouts[name].encode(captured[f"layers.{point}.output"])
        got = rows_of(done, number)
        assert sorted(got) == list(range(len(PROMPT) + 6)), "every token of prompt and answer has its row"
        torch.testing.assert_close(torch.tensor([got[k] for k in sorted(got)]), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(captured[f"readouts.{name}"], want, rtol=1e-5, atol=1e-5)
    dense = readouts["sae"].encode(captured["layers.0.output"])
    for position, features in rows_of(done, 3).items():
        assert len(features) == 10
        for feature, value in features.items():
            assert value == pytest.approx(float(dense[position, feature]), rel=1e-5, abs=1e-5)
    assert captured["readouts.sae.features"].shape == (14, 10)


def test_an_answer_that_ends_before_its_first_token_has_the_prompts_logprobs(model) -> None:
    engine = Engine(model)
    engine.submit(
        request(model, "a", PROMPT, 6, ["early"], stop={"readout": "early", "above": -1e9}, prompt_logprobs=0)
    )
    events = []
    while not any(isinstance(event, Finished) for event in events):
        events += engine.step(wait=True)
    assert [len(one.logprobs) for one in events if isinstance(one, PromptLogprobs)] == [len(PROMPT) - 1]
    assert events[-1].reason == "stop"
    assert not events[-1].tokens


@pytest.mark.parametrize(
    ("tokens", "want"),
    [
        ("prompt", range(8)),
        ("generated", range(8, 13)),
        ("last", [12]),
        ({"last": 3}, [10, 11, 12]),
        ("prompt_last", [7]),
        ({"positions": [2, 9]}, [2, 9]),
    ],
)
def test_rows_come_of_the_tokens_that_are_asked_for(model, tokens, want) -> None:
    (done,) = Engine(model).generate([request(model, "a", PROMPT, 5, [{"name": "early", "tokens": tokens}])])
    assert sorted(rows_of(done)) == list(want)


def test_a_streams_rows_come_one_forward_after_their_tokens_and_are_all_there_at_the_end(model) -> None:
    engine = Engine(model)
    engine.submit(request(model, "a", PROMPT, 5, ["early"]))
    told, tokens, ends = list[int](), 0, False
    while not ends:
        for event in engine.step(wait=True):
            rows = event.readouts if isinstance(event, (Delta, Finished)) else ()
            told += [position for part in rows for position in positions_of(part, len(PROMPT))]
            if isinstance(event, Delta):
                tokens += len(event.tokens)
                assert told == list(range(len(PROMPT) + tokens - 1))
            ends = isinstance(event, Finished)
    assert told == list(range(len(PROMPT) + 5))


STEER = {"op": "scale", "factor": 1.5}
NEVER, ALWAYS = {"above": 1e9}, {"above": -1e9}


def gated(point: str, readout: str, **when: Any) -> dict[str, Any]:
    tokens = "generated" if (readout, point) == ("late", "layers.0.output") else "all"
    return STEER | {"point": point, "tokens": tokens, "when": {"readout": readout, **when}}


@pytest.mark.parametrize(
    ("readout", "point", "lag"),
    [("early", "layers.1.output", 0), ("early", "layers.0.output", 0), ("late", "layers.0.output", 1)],
)
def test_a_gate_that_never_opens_changes_no_bit_and_one_that_is_always_open_changes_what_no_gate_would(
    model, readout, point, lag
) -> None:
    tokens = "generated" if lag else "all"
    plain = STEER | {"point": point, "tokens": tokens}

    def run(*changes: Any) -> Finished:
        return Engine(model).generate([request(model, "a", PROMPT, 6, ["early", "late"], changes, capture=ALL)])[0]

    without, ungated = run(), run(plain)
    shut, opened = (run(gated(point, readout, **when)) for when in (NEVER, ALWAYS))
    for name in ALL["points"]:
        assert torch.equal(shut.captured.values[name], without.captured.values[name])
        assert torch.equal(opened.captured.values[name], ungated.captured.values[name])
    assert shut.tokens == without.tokens
    made = request(model, "a", PROMPT, 6, ["early", "late"], [gated(point, readout, **NEVER)])
    assert made.edits[0].gate.lag == lag


@pytest.mark.parametrize(("readout", "point"), [("early", "layers.1.output"), ("late", "layers.1.output")])
def test_a_gate_acts_on_the_row_whose_value_opens_it(model, readout, point) -> None:
    (plain,) = Engine(model).generate([request(model, "a", PROMPT, 1, [readout], capture=ALL)])
    values = {at: row[0] for at, row in rows_of(plain).items()}
    middle = sorted(values.values())[len(values) // 2]
    changes = [STEER | {"point": point, "tokens": "prompt", "when": {"readout": readout, "above": middle}}]
    asked = request(model, "a", PROMPT, 1, [readout], changes, capture=ALL)
    (done,) = Engine(model).generate([asked])
    for at in range(len(PROMPT)):
        want = plain.captured.values[point][at] * (1.5 if values[at] > middle else 1.0)
        torch.testing.assert_close(done.captured.values[point][at], want)
    rows, kept, mean, largest = asked.edits[0].report.summary
    opened = sum(values[at] > middle for at in range(len(PROMPT)))
    assert (rows, kept) == (opened, len(PROMPT) - opened)
    assert mean == pytest.approx(0.5, rel=1e-3)
    assert largest == pytest.approx(0.5, rel=1e-3)


def test_a_gate_behind_its_point_acts_on_the_next_row(model) -> None:
    (plain,) = Engine(model).generate([request(model, "a", PROMPT, 4, ["late"], capture=ALL)])
    values = {at: row[0] for at, row in rows_of(plain).items()}
    last = len(PROMPT) - 1
    changes = [STEER | {"point": "layers.0.output", "tokens": "generated"}]
    changes[0]["when"] = {"readout": "late", "above": values[last] - 1e-3}
    (done,) = Engine(model).generate([request(model, "a", PROMPT, 4, ["late"], changes, capture=ALL)])
    torch.testing.assert_close(
        done.captured.values["layers.0.output"][last + 1], plain.captured.values["layers.0.output"][last + 1] * 1.5
    )


def test_a_gate_opens_after_rows_in_a_row_also_when_the_prompt_comes_in_chunks(model) -> None:
    prompt = PROMPT * 6
    (plain,) = Engine(model).generate([request(model, "a", prompt, 1, ["early"])])
    values = [rows_of(plain)[at][0] for at in range(len(prompt))]
    above = sorted(values)[len(values) // 4]
    opened, run = [], 0
    for value in values:
        run = run + 1 if value > above else 0
        opened.append(run >= 3)
    changes = [STEER | {"point": "layers.1.output", "tokens": "prompt"}]
    changes[0]["when"] = {"readout": "early", "above": above, "for": 3}
    for chunks in (1024, 7, 1):
        asked = request(model, "a", prompt, 1, ["early"], changes)
        Engine(model, prefill_tokens=chunks).generate([asked])
        rows, kept, *_ = asked.edits[0].report.summary
        assert (rows, kept) == (sum(opened), len(opened) - sum(opened))
        assert 0 < rows < len(prompt)


def test_an_answer_ends_before_the_token_that_would_follow_the_row_that_met_the_condition(model) -> None:
    (plain,) = Engine(model).generate([request(model, "a", PROMPT, 12, ["late"])])
    values = {at: row[0] for at, row in rows_of(plain).items()}
    from_first = {at: value for at, value in values.items() if at >= len(PROMPT) - 1}
    limit = sorted(from_first.values())[-2]
    ends = next(at for at, value in from_first.items() if value > limit)
    for streamed in (True, False):
        asked = request(model, "a", PROMPT, 12, ["late"], stop={"readout": "late", "above": limit}, streamed=streamed)
        (done,) = Engine(model).generate([asked])
        assert done.reason == "stop"
        assert list(done.tokens) == list(plain.tokens)[: ends - len(PROMPT) + 1]
        assert done.stop_reason.readout == "late"
        assert done.stop_reason.token == ends
        assert done.stop_reason.value == pytest.approx(values[ends], abs=1e-4)


@pytest.mark.parametrize("op", ["add", "clamp", "scale", "zero"])
def test_a_features_change_moves_the_row_by_its_direction(model, op) -> None:
    readout = held(model.points.named("embed.output", "")[0].shape[-1], device="cpu")["relu"]
    (plain,) = Engine(model).generate([request(model, "a", PROMPT, 1, capture=ALL)])
    before = plain.captured.values["layers.1.output"]
    features = readout.encode(before)
    feature = int(features[: len(PROMPT)].sum(0).argmax())
    change = {"op": op, "sae": "relu", "feature": feature, "tokens": "prompt"} | (
        {} if op == "zero" else {"value": 2.0}
    )
    (done,) = Engine(model).generate([request(model, "a", PROMPT, 1, [], [change], capture=ALL)])
    f = features[:, feature, None]
    v = {"add": f + 2, "clamp": f * 0 + 2, "scale": f * 2, "zero": f * 0}[op]
    direction = readout._tensors["W_dec"][feature]
    want = before + (v - f) * direction
    torch.testing.assert_close(done.captured.values["layers.1.output"][:8], want[:8], rtol=1e-4, atol=1e-4)


def random_request(model, id: str, numbers: random.Random) -> Request:
    prompt = [numbers.randrange(3, 250) for _ in range(numbers.choice([2, 7, 20, 45]))]
    readouts = numbers.sample(["early", "mid", "late", {"name": "sae", "top_k": 4}], numbers.randrange(1, 4))
    names = [one if isinstance(one, str) else one["name"] for one in readouts]
    changes = []
    if numbers.random() < 0.3:
        feature = {"feature": 5, "value": 1.5, "tokens": "generated"}
        changes.append({"op": "clamp", "sae": "relu"} | feature)
    for _ in range(numbers.randrange(3)):
        name = numbers.choice(names)
        point = numbers.choice(["layers.0.output", "layers.1.output"])
        late = name == "late" and point == "layers.0.output"
        when = {"readout": name, numbers.choice(["above", "below"]): numbers.choice([-0.5, 0.1])}
        when |= {"feature": 2} if name in ("mid", "sae") else {}
        when |= numbers.choice([{}, {"for": 2}, {"for": 3}])
        changes.append(
            {"op": "scale", "factor": 1.2, "point": point, "tokens": "generated" if late else "all", "when": when}
        )
    stop = {"readout": names[0], "above": 1.5} | ({"feature": 2} if names[0] in ("mid", "sae") else {})
    more = {"capture": ALL} if numbers.random() < 0.3 else {}
    stop = stop if numbers.random() < 0.3 else None
    return request(model, id, prompt, numbers.choice([1, 4, 11]), readouts, changes, stop, **more)


@torch.inference_mode()
def company(model, requests: list[Request], numbers: random.Random, **options: Any) -> dict[str, Finished]:
    """What streamed requests say in all that run together, of whom some lose their places on the way."""
    engine = Engine(model, **options)
    for one in requests:
        engine.submit(one)
    done, rows = dict[str, Finished](), dict[str, list[Any]]()
    while len(done) < len(requests):
        for event in engine.step(wait=True):
            if isinstance(event, (Delta, Finished)):
                rows.setdefault(event.id, []).extend(event.readouts)
            if isinstance(event, Finished):
                done[event.id] = replace(event, readouts=tuple(rows[event.id]))
        if engine._scheduler.running and numbers.random() < 0.4:
            engine._recovery.preempt(numbers.choice(list(engine._scheduler.running)))
    assert engine._scheduler.preempted
    return done


def together_and_alone(model, seed: int) -> Iterator[tuple[Request, Finished, Finished]]:
    """Random requests, each with what it gives in the others' company and alone."""

    def made() -> list[Request]:
        numbers = random.Random(seed)
        return [random_request(model, f"r{i}", numbers) for i in range(9)]

    together = company(model, made(), random.Random(seed), max_running=5, prefill_tokens=32)
    for asked in made():
        (alone,) = Engine(model).generate([asked])
        yield asked, together[asked.id], alone


@pytest.mark.parametrize("seed", range(4))
def test_over_random_schedules_a_request_gives_alone_what_it_gives_in_company(model, seed) -> None:
    for asked, got, alone in together_and_alone(model, seed):
        assert list(got.tokens) == list(alone.tokens), asked.id
        ended = alone.stop_reason and alone.stop_reason.token
        assert (got.reason, got.stop_reason and got.stop_reason.token) == (alone.reason, ended)
        for number, one in enumerate(asked.readouts):
            mine, want = rows_of(got, number), rows_of(alone, number)
            assert sorted(mine) == sorted(want) == list(range(len(asked.prompt) + len(got.tokens)))
            if one.top_k is None:
                rows = [torch.tensor([found[k] for k in sorted(found)]) for found in (mine, want)]
                torch.testing.assert_close(*rows, rtol=1e-3, atol=1e-3)


@pytest.mark.cpu
@pytest.mark.parametrize("seed", range(3))
def test_batch_invariant_values_have_the_same_bits_in_any_company(invariant, seed) -> None:
    for asked, got, alone in together_and_alone(invariant, seed):
        assert got.tokens == alone.tokens
        for number in range(len(asked.readouts)):
            assert rows_of(got, number) == rows_of(alone, number)


def test_rows_come_once_when_a_sequence_is_run_again(model) -> None:
    (got,) = company(model, [request(model, "a", PROMPT, 30, ["early"])], random.Random(0)).values()
    told = [position for part in got.readouts for position in positions_of(part, len(PROMPT))]
    assert told == list(range(len(PROMPT) + 30))


def test_a_fault_in_one_requests_values_or_gate_ends_that_request_alone(model, drain, endings) -> None:
    changes = [gated("layers.1.output", "early", **ALWAYS)]
    requests = [
        request(model, "columns", PROMPT, 6, ["early"], capture=ALL),
        request(model, "gate", PROMPT, 6, ["early"], changes),
        request(model, "sound", PROMPT, 6, ["early"], changes, capture=ALL),
    ]
    (alone,) = Engine(model).generate([request(model, "sound", PROMPT, 6, ["early"], changes, capture=ALL)])
    engine = Engine(model)
    for one in requests:
        engine.submit(one)
    events = engine.step()
    running = {seq.request.id: seq for seq in engine._scheduler.running}
    running["columns"].readouts._parts[0].clear()
    running["gate"].request.edits[0].gate.known -= 1
    done = endings([*events, *drain(engine)])
    assert (done["columns"].captured, done["gate"].reason) == (None, "error")
    assert "IndexError" in done["columns"].error
    assert "a gate misses rows" in done["gate"].error
    assert done["sound"].tokens == alone.tokens
    assert done["sound"].captured is not None
