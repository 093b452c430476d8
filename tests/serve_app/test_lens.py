"""The logit lens over HTTP: once per token, streamed or whole, together with every other field."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from deployments.activations import read_run
from deployments.demo_model import WEIGHTS
from tests.serve_app.completions import MODEL, PROMPT, refused
from tests.serve_app.completions import post as complete

LAYERS = 6
MESSAGES = [{"role": "user", "content": f"{PROMPT} How many pens is that?"}]
CALCULATOR = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}
LENS = {"layers": "all", "top_k": 3}


def ask(client, lens=LENS, extra=None, **fields):
    fields = {"temperature": 0, "max_tokens": 24, "logprobs": True, "top_logprobs": 3} | fields
    body = {"logit_lens": lens} | (extra or {})
    return client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=body, **fields)


def joined(chunks, index=0):
    """The lens and the logprobs of one choice of a stream."""
    mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    lens = [one for choice in mine if "logit_lens" in choice.model_extra for one in choice.logit_lens["content"]]
    return lens, [one for choice in mine if choice.logprobs for one in choice.logprobs.content]


def plain(content):
    """A lens without its numbers, which differ in their last bits, and those."""
    shape = [
        (
            one["token_id"],
            one["token"],
            one["bytes"],
            [(at["layer"], [top["token_id"] for top in at["top"]]) for at in one["layers"]],
        )
        for one in content
    ]
    return shape, [top["logprob"] for one in content for at in one["layers"] for top in at["top"]]


def assert_same(got, want):
    (shape, numbers), (its, others) = plain(got), plain(want)
    assert shape == its
    assert numbers == pytest.approx(others, abs=1e-4)


def assert_same_logprobs(got, want):
    shapes = [[(one.token, one.bytes, [top.token for top in one.top_logprobs]) for one in some] for some in (got, want)]
    assert shapes[0] == shapes[1]
    assert [one.logprob for one in got] == pytest.approx([one.logprob for one in want], abs=1e-4)


def test_each_token_has_its_layers_and_the_last_says_what_logprobs_say(client):
    answer = ask(client, temperature=1.2, seed=4, max_tokens=40)
    (choice,) = answer.choices
    content = choice.logit_lens["content"]
    assert len(content) == answer.usage.completion_tokens
    for one, logprob in zip(content, choice.logprobs.content, strict=True):
        assert (one["token"], one["bytes"]) == (logprob.token, logprob.bytes)
        assert [at["layer"] for at in one["layers"]] == list(range(LAYERS))
        last = one["layers"][-1]["top"]
        assert [(top["token"], top["bytes"]) for top in last] == [
            (top.token, top.bytes) for top in logprob.top_logprobs
        ]
        assert [top["logprob"] for top in last] == pytest.approx(
            [top.logprob for top in logprob.top_logprobs], abs=1e-4
        )
        assert all(len(at["top"]) == 3 for at in one["layers"])


def test_it_is_the_final_norm_and_head_of_what_is_recorded_after_interventions(served, tokenizer):
    steer = {"op": "add", "point": "layers.2.output", "vector": [1.0, -1.0] * 96, "scale": 3, "tokens": "generated"}
    asked = {"capture": {"points": ["layers.*.output"]}, "session_id": "lens", "interventions": [steer]}
    lens = {"layers": [-1, 2, 0, 5], "top_k": 4}
    answer = complete(served, logit_lens=lens, return_token_ids=True, **asked).json()
    (choice,) = answer["choices"]
    content, ids = choice["logit_lens"]["content"], choice["token_ids"]
    assert [one["token_id"] for one in content] == ids
    assert content != complete(served, logit_lens=lens).json()["choices"][0]["logit_lens"]["content"]
    (run,) = answer["activations_meta"]["runs"]
    model = AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32)
    for layer in (0, 2, 5):
        point = run["points"][f"layers.{layer}.output"]
        rows = read_run(point["uri"], run_id=run["run_id"])[f"layers.{layer}.output"]
        with torch.inference_mode():
            wanted = model.lm_head(model.model.norm(rows)).log_softmax(-1)[run["prompt_tokens"] - 1 : -1]
        for one, row in zip(content, wanted, strict=True):
            assert [at["layer"] for at in one["layers"]] == [0, 2, 5]
            top = next(at["top"] for at in one["layers"] if at["layer"] == layer)
            assert [entry["logprob"] for entry in top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-3)
            assert [row[entry["token_id"]].item() for entry in top] == pytest.approx(
                row.topk(4).values.tolist(), abs=1e-3
            )
            assert [tokenizer.decode([entry["token_id"]]) for entry in top] == [entry["token"] for entry in top]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 1},
        {"max_tokens": 0},
        {"stop": [" the", "zz"]},
        {"tools": [CALCULATOR], "max_tokens": 128},
        {"response_format": {"type": "json_object"}},
        {"extra": {"ignore_eos": True}, "max_tokens": 90},
        {"extra": {"store_activations": True, "session_id": "lens"}},
        {"logprobs": None, "top_logprobs": None},
    ],
    ids=["plain", "one token", "no token", "stop", "tools", "json", "beyond the end", "recorded", "no logprobs"],
)
def test_a_streams_lens_and_logprobs_join_to_those_of_the_whole_answer(client, fields):
    whole = ask(client, **fields)
    (choice,) = whole.choices
    content = choice.logit_lens["content"]
    assert len(content) == whole.usage.completion_tokens
    chunks = list(ask(client, stream=True, **fields))
    lens, logprobs = joined(chunks)
    assert_same(lens, content)
    assert_same_logprobs(logprobs, choice.logprobs.content if choice.logprobs and choice.logprobs.content else [])
    text = [one.delta.content or "" for chunk in chunks for one in chunk.choices]
    assert "".join(text) == (choice.message.content or "")
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.logprobs:  # both come together
                assert len(choice.logit_lens["content"]) == len(choice.logprobs.content)


def test_each_choice_has_its_own(client, served):
    fields = {"n": 3, "seed": 5, "temperature": 1.0, "max_tokens": 12}
    whole = ask(client, **fields)
    chunks = list(ask(client, stream=True, **fields))
    for choice in whole.choices:
        assert len(choice.logit_lens["content"]) == len(choice.logprobs.content)
        lens, logprobs = joined(chunks, choice.index)
        assert_same(lens, choice.logit_lens["content"])
        assert_same_logprobs(logprobs, choice.logprobs.content)
    prompts = [PROMPT, "Ann has"]
    together = complete(served, prompt=prompts, n=2, logit_lens=LENS).json()["choices"]
    assert [choice["index"] for choice in together] == [0, 1, 2, 3]
    for choice in together:
        alone = complete(served, prompt=prompts[choice["index"] // 2], logit_lens=LENS).json()["choices"][0]
        assert_same(choice["logit_lens"]["content"], alone["logit_lens"]["content"])


def test_what_generates_nothing_shows_what_comes_behind_the_prompt(served):
    (first,) = complete(served, max_tokens=1, logit_lens=LENS).json()["choices"][0]["logit_lens"]["content"]
    for fields in ({"max_tokens": 0}, {"capture": {"points": ["norm.output"], "mode": "trace", "return": "inline"}}):
        lens = complete(served, logit_lens=LENS, **fields).json()["choices"][0]["logit_lens"]
        assert lens["content"] == []
        (behind,) = lens["prompt"]
        for own, wanted in zip(behind["layers"], first["layers"], strict=True):
            assert [one["token_id"] for one in own["top"]] == [one["token_id"] for one in wanted["top"]]


def test_tokens_of_the_prompt_are_chosen_and_targets_have_their_rank(served):
    asked = {"layers": [-1], "top_k": 2, "tokens": {"text": "3 boxes"}, "targets": [" pens", 7]}
    for stream in (False, True):
        answer = complete(served, logit_lens=asked, max_tokens=2, stream=stream)
        if stream:
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            choices = [choice for event in events for choice in event["choices"]]
            seen = [one for choice in choices for one in choice.get("logit_lens", {}).get("prompt", [])]
        else:
            seen = answer.json()["choices"][0]["logit_lens"]["prompt"]
        assert "".join(one["token"] for one in seen) == "3 boxes"
        assert [one["position"] for one in seen] == [*range(seen[0]["position"], seen[0]["position"] + len(seen))]
        for one in seen:
            (layer,) = one["layers"]
            assert [target["token_id"] for target in layer["targets"]][1] == 7
            for target in layer["targets"]:
                ranks = {top["token_id"]: rank for rank, top in enumerate(layer["top"], 1)}
                assert target["rank"] == ranks.get(target["token_id"], target["rank"])
                assert (target["rank"] > 2) == (target["token_id"] not in ranks)


def test_an_echoed_prompt_has_none(served):
    (choice,) = complete(served, logit_lens={}, echo=True, logprobs=1).json()["choices"]
    assert len(choice["logit_lens"]["content"]) == 8
    assert [len(at["top"]) for at in choice["logit_lens"]["content"][0]["layers"]] == [5] * LAYERS
    assert len(choice["logprobs"]["tokens"]) > 8


BAD = [
    ({"layers": [LAYERS]}, "logit_lens.layers[0]"),
    ({"layers": [0, -1, -LAYERS - 1]}, "logit_lens.layers[2]"),
    ({"layers": [0, "1"]}, "logit_lens.layers[1]"),
    ({"layers": [True]}, "logit_lens.layers[0]"),
    ({"layers": []}, "logit_lens.layers"),
    ({"layers": "some"}, "logit_lens.layers"),
    ({"layers": None}, "logit_lens.layers"),
    ({"top_k": -1}, "logit_lens.top_k"),
    ({"targets": ["several tokens"]}, "logit_lens.targets[0]"),
    ({"tokens": "last"}, "logit_lens.tokens"),
    ({"tokens": {"text": "nowhere"}}, "logit_lens.tokens.text"),
    ({"tokens": {"from": 3, "to": 3}}, "logit_lens.tokens"),
    ({"tokens": {"from": 0, "to": 1000}}, "logit_lens.tokens"),
    ({"targets": "last"}, "logit_lens.targets"),
    ({"top_k": 21}, "logit_lens.top_k"),
    ({"top_k": "5"}, "logit_lens.top_k"),
    ({"topk": 5}, "logit_lens.topk"),
    ("all", "logit_lens"),
]


@pytest.mark.parametrize(("bad", "param"), BAD, ids=[json.dumps(bad) for bad, _ in BAD])
def test_what_cannot_be_is_refused_by_its_path_and_nothing_runs(served, statistics, bad, param):
    before = statistics()["steps"]
    assert refused(complete(served, logit_lens=bad))[:2] == (400, param)
    assert statistics()["steps"] == before


def test_more_than_an_answer_may_hold_is_refused_with_the_limit(served, statistics):
    before = statistics()["steps"]
    fields = {"logit_lens": {"top_k": 20}, "max_tokens": 10, "n": 17}  # 6 layers x 20 x 170 tokens
    answer = complete(served, **fields)
    assert refused(answer) == (400, "logit_lens", "logit_lens_too_large")
    assert "20400" in answer.text
    assert "20000" in answer.text
    assert statistics()["steps"] == before
