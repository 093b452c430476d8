"""Activations of many prompts, against what single requests give."""

from __future__ import annotations

import numpy as np
import pytest

from vitrine.experiments import prompt_batches

TEXTS = [f"{name} has {'3 boxes of ' * (n % 5)}{n} pens" for n, name in enumerate(["Ann", "Tom", "Eva"] * 4)]
CHATS = [[{"role": "user", "content": text}] for text in TEXTS[:3]]


@pytest.fixture
def small_requests(monkeypatch):
    monkeypatch.setattr(prompt_batches, "PROMPTS_PER_REQUEST", 4)


@pytest.mark.usefixtures("small_requests")
def test_rows_come_in_the_order_of_the_prompts(server):
    labels = [text.split()[0] for text in TEXTS]
    acts = server.collect(TEXTS, ["layers.*.output", "norm.output"], labels=labels, tags={"of": "a test"})
    assert acts.values.shape == (len(TEXTS), 7, 192)
    assert acts.layers == [0, 1, 2, 3, 4, 5, None]
    assert list(acts.labels) == labels
    for text, label, run in zip(TEXTS, labels, server.load_runs(acts.run_ids), strict=True):
        assert run.facts["text"].startswith(text)
        assert run.facts["tags"] == {"of": "a test", "label": label}
    for place in (0, 5, 11):
        alone = server.collect(TEXTS[place : place + 1], acts.points)
        np.testing.assert_allclose(alone.values[0], acts.values[place], rtol=1e-4, atol=1e-4)


def test_all_runs_are_in_one_session_by_their_places(server):
    acts = server.collect(["b", "a"], "layers.0.output", tags=[{"n": "1"}, {"n": "2"}], store_text=False)
    runs = server.load_runs(acts.session)
    assert sorted((run.facts["sample_id"], run.facts["tags"]["n"], run.run_id) for run in runs) == [
        ("0", "1", acts.run_ids[0]),
        ("1", "2", acts.run_ids[1]),
    ]
    assert runs[0].facts["text"] is None


def test_points_come_in_the_order_in_which_the_model_reaches_them(server):
    acts = server.collect(["Ann"], ["norm.output", "layers.1.attention.output", "layers.1.input_layernorm.output"])
    assert acts.points == ["layers.1.input_layernorm.output", "layers.1.attention.output", "norm.output"]


def test_several_tokens_of_each_prompt_are_a_list(server):
    acts = server.collect(TEXTS[:5], "layers.1.output", tokens="all")
    runs = server.load_runs(acts.run_ids)
    assert [rows.shape for rows in acts.values] == [(run.facts["prompt_tokens"], 1, 192) for run in runs]


def test_chats_are_collected_with_their_templates(server):
    acts = server.collect(CHATS, "layers.1.output", labels=[True, False, True], max_tokens=2)
    assert acts.values.shape == (3, 1, 192)
    runs = server.load_runs(acts.run_ids)
    assert [run.facts["tags"]["label"] for run in runs] == ["true", "false", "true"]
    assert [run.facts["tokens"] - run.facts["prompt_tokens"] for run in runs] == [2, 2, 2]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"labels": [1]}, "labels: there are 1 for 2 prompts"),
        ({"tags": [{}]}, "tags: there are 1 for 2 prompts"),
        ({"points": ["layers.0.output", "layers.0.attention.heads"]}, "points: rows have different shapes"),
        ({"prompts": "Ann has"}, "prompts: give a list"),
        ({"prompts": ["Ann", 3]}, r"prompts\[1\]: 3 is neither"),
    ],
)
def test_a_mistake_names_its_argument(server, wrong, message):
    given = {"prompts": ["Ann", "Tom"], "points": "layers.0.output"} | wrong
    with pytest.raises(ValueError, match=message):
        server.collect(**given)


def test_requests_hold_texts_of_about_one_length(monkeypatch):
    monkeypatch.setattr(prompt_batches, "PROMPTS_PER_REQUEST", 2)
    monkeypatch.setattr(prompt_batches, "MOST_CHARACTERS", 20)
    chat = [{"role": "user", "content": "so?"}]
    prompts = ["x" * 30, "x", chat, "x" * 9, "xx", "x" * 10, ""]
    assert prompt_batches.requests(prompts) == [[6, 1], [4, 3], [5], [0], [2]]
