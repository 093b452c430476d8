"""Lens, patching, sweeps and attention give the right results on the shipped model."""

from __future__ import annotations

import asyncio
from functools import partial

import httpx
import numpy as np
import pytest

import vitrine

CLEAN, CORRUPT = "Tom has 3 boxes of 12 pens. How many", "Tom has 4 boxes of 15 pens. How many"
TARGET, AGAINST = " pens", " boxes"


def test_the_last_layers_lens_is_the_models_own_distribution(server):
    prompt = "Tom has 3 boxes of 12"
    lens = server.lens(prompt, targets=[TARGET, AGAINST], top_k=5)
    answer = server.complete(prompt, max_tokens=1, temperature=0, logprobs=5)
    own = answer["choices"][0]["logprobs"]["top_logprobs"][0]
    assert lens.tokens == server.tokens(prompt)
    assert lens.layers == [*range(6)]
    likeliest = dict(lens.top[-1][-1])
    assert likeliest.keys() >= own.keys() - {""}
    for token, logprob in lens.top[-1][-1]:
        assert own.get(token, logprob) == pytest.approx(logprob, abs=0.05)  # the served model is in bfloat16
        if token in (TARGET, AGAINST):
            assert lens.logprobs[-1, -1, lens.targets.index(token)] == pytest.approx(logprob, abs=1e-5)
    assert (lens.ranks >= 1).all()
    assert ((lens.ranks == 1) == (lens.logprobs.argmax(-1)[..., None] == [0, 1]))[lens.ranks == 1].all()


def test_layers_of_a_lens_come_in_the_order_in_which_they_were_asked_for(server):
    lens, whole = (server.lens("Tom has 3", targets=TARGET, layers=layers) for layers in ([-1, 0, 4], "all"))
    assert lens.layers == [5, 0, 4]
    np.testing.assert_array_equal(lens.logprobs, whole.logprobs[lens.layers])
    assert lens.top == [whole.top[layer] for layer in lens.layers]


def test_sessions_of_experiments_are_named_after_them(served, server):
    server.attention("Tom has 3", 0)
    server.patch_grid("Tom has 3", "Tom has 4", target=TARGET, layers=[0], positions=[0])
    server.collect(["Tom has 3"], "norm.output")
    sessions = httpx.get(f"{served.base_url}/activations/sessions", params={"limit": 1000}, timeout=60).json()["data"]
    assert {"attention", "patch", "collect"} <= {session["id"].partition("-")[0] for session in sessions}


def test_a_patch_grid_is_what_patches_one_by_one_do(server):
    grid = server.patch_grid(CLEAN, CORRUPT, target=TARGET, against=AGAINST)
    tokens = server.tokens(CLEAN)
    assert grid.values.shape == (6, len(tokens))  # more than 64 cells: several requests
    assert [clean for clean, _ in grid.tokens] == tokens
    # The last layer's output at the last token decides all, at the others nothing.
    assert grid.values[-1, -1] == pytest.approx(grid.clean, abs=0.05)
    assert grid.values[-1, :-1] == pytest.approx(grid.corrupt, abs=0.05)
    # So do tokens before the first that differs.
    same = next(i for i, (one, other) in enumerate(grid.tokens) if one != other)
    assert grid.values[:, :same] == pytest.approx(grid.corrupt, abs=0.05)
    acts = server.collect([CLEAN], "layers.2.output", tokens="all")
    place = {"positions": [same]}
    patch = {"op": "replace", "point": "layers.2.output", "tokens": place}
    patch["from"] = {"run_id": acts.run_ids[0], "tokens": place}
    lens = server.lens(CORRUPT, targets=[TARGET, AGAINST], tokens="prompt_last", interventions=[patch])
    alone = lens.logprobs[-1, 0, 0] - lens.logprobs[-1, 0, 1]
    assert grid.values[2, same] == pytest.approx(alone, abs=0.1)
    assert grid.restored[-1, -1] == pytest.approx(1, abs=0.1)


def test_prompts_of_different_lengths_are_refused_with_both_tokenizations(server):
    with pytest.raises(ValueError, match="4 tokens, corrupt 6") as refused:
        server.patch_grid("Tom has 3", "Ann has 3", target=TARGET)
    assert "['A', 'n', 'n', ' has', ' ', '3']" in str(refused.value)


def test_layers_and_positions_of_a_grid_may_count_from_the_end(server):
    ask = partial(server.patch_grid, "Tom has 3", "Tom has 4", target=TARGET)
    grid = ask(layers=[-1, 2], positions=np.array([-1, 0]))
    assert (grid.layers, grid.positions, grid.tokens) == ([5, 2], [3, 0], [("3", "4"), ("Tom", "Tom")])
    assert grid.values == pytest.approx(ask(layers=[5, 2], positions=[3, 0]).values, abs=0.1)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"layers": [6]}, IndexError, r"layers: \[6\] are not among 0 to 5"),
        ({"positions": [-5]}, IndexError, r"positions: \[-5\] are not among 0 to 3"),
        ({"point": "embed"}, ValueError, "point: 'embed' is not one place in each layer"),
    ],
)
def test_a_grid_of_places_that_are_not_there_is_refused(server, fields, error, message):
    with pytest.raises(error, match=message):
        server.patch_grid("Tom has 3", "Tom has 4", target=TARGET, **fields)


def test_tokens_are_texts_in_any_script(server):
    text = "São 東\tx"
    tokens = server.tokens(text)
    assert tokens == server.lens(text).tokens == server.attention(text, 0).tokens
    assert "\t" in tokens


def test_a_score_may_ask_the_server(server):
    acts = server.collect(["Ann has 3 boxes", "Eva went to the sea"], "resid_post", labels=[1, 0])
    rate = lambda text: len(server.generate(text or "Tom", max_tokens=1))  # noqa: E731
    sweep = server.sweep("Tom", vitrine.difference_of_means(acts), layers=[1], scales=[1], max_tokens=2, score=rate)
    assert sweep.rows[0].score >= 0


def test_variants_without_a_seed_share_one(server):
    fields = {"max_tokens": 8, "temperature": 1.5, "ignore_eos": True}
    choices = server.complete("Tom", variants=[[], []], **fields)["choices"]
    assert choices[0]["text"] == choices[1]["text"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"variants": [[]], "n": 2}, "variants", "leave n out"),
        ({"variants": []}, "variants", "the baseline"),
        ({"logit_lens": {"tokens": "generated"}, "max_tokens": 0}, "logit_lens.tokens", "no token is generated"),
        (
            {"interventions": [{"op": "zero", "point": "resid_post", "tokens": "generated_last"}], "max_tokens": 0},
            "interventions[0].tokens",
            "no token is generated",
        ),
    ],
)
def test_what_would_mean_nothing_is_refused(server, fields, param, message):
    with pytest.raises(vitrine.ServerError, match=message) as refused:
        server.complete("Tom", **fields)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_a_streamed_variant_is_refused(served):
    body = {"model": "vitrine-demo", "prompt": "Tom", "variants": [[]], "stream": True}
    answer = httpx.post(f"{served.base_url}/completions", json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "variants")


def test_heads_are_steered_along_a_direction_of_theirs(server):
    acts = server.collect(["Ann has 3 boxes", "Eva went to the sea"], "z", labels=[1, 0])
    steer = vitrine.difference_of_means(acts).at(3)
    texts = {server.generate("Tom", max_tokens=6, steer=steer * scale) for scale in (0, 1000)}
    assert len(texts) == 2


def test_a_lens_takes_one_target_and_one_prompt(server):
    lens = server.lens("Tom has 3", targets=TARGET, tokens="prompt_last")
    assert lens.targets == [TARGET]
    for ask in (server.lens, lambda prompts: server.attention(prompts, 0)):
        with pytest.raises(ValueError, match="prompt: give one prompt"):
            ask(["Tom has 3", "Ann"])


def test_a_target_of_several_tokens_is_refused_by_its_place(server):
    with pytest.raises(vitrine.ServerError) as refused:
        server.lens("Tom has 3", targets=[TARGET, "several tokens"])
    assert (refused.value.status, refused.value.param) == (400, "logit_lens.targets[1]")


def test_a_sweep_is_what_each_steer_generates_alone(server, monkeypatch):
    monkeypatch.setattr("vitrine.experiments.generating.MOST_NUMBERS", 192)  # one vector in a request
    acts = server.collect(["Ann has 3 boxes", "Eva went to the sea"], "resid_post", labels=[1, 0])
    direction = vitrine.difference_of_means(acts)
    sweep = server.sweep("Tom", direction, layers=[1, 3], scales=[0, 4], max_tokens=6, score=len)
    assert [(row.layer, row.scale) for row in sweep.rows] == [(1, 0), (1, 4), (3, 0), (3, 4)]
    plain = server.generate("Tom", max_tokens=6)
    assert sweep.rows[0].text == sweep.rows[2].text == plain
    assert sweep.rows[0].score == len(plain)
    assert len({row.text for row in sweep.rows}) > 1
    both = server.sweep(["Tom", "Ann has"], direction, layers=[1, 3], scales=[0, 4], max_tokens=6)
    assert [row.text for row in both.rows[:4]] == [row.text for row in sweep.rows]
    assert [row.prompt for row in both.rows] == [0] * 4 + [1] * 4
    assert both.rows[4].text == server.generate("Ann has", max_tokens=6)


def test_attention_is_causal_and_sums_to_one(server):
    attention = server.attention("Tom has 3 boxes", layer=-1)
    heads, tokens, _ = attention.values.shape
    assert (attention.layer, len(attention.tokens)) == (5, tokens)
    assert heads > 1
    assert attention.values.sum(-1) == pytest.approx(np.ones((heads, tokens)), abs=0.02)
    assert not np.triu(attention.values, 1).any()
    several = server.attention("Tom has 3 boxes", layer=[-1, 2])
    assert [pattern.layer for pattern in several] == [5, 2]
    np.testing.assert_array_equal(several[0].values, attention.values)


def test_pictures_are_files(server, tmp_path):
    acts = server.collect(["Ann has 3 boxes", "Eva went to the sea"], "resid_post", labels=[1, 0])
    sweep = server.sweep("Tom", vitrine.difference_of_means(acts), layers=[1], scales=[0, 1], max_tokens=2, score=len)
    lens = server.lens("Tom has 3", targets=[TARGET])
    grid = server.patch_grid("Tom has 3", "Tom has 4", target=TARGET, layers=[0, 5])
    for number, plot in enumerate(
        (lens.plot, lambda path: lens.plot(0, path=path), grid.plot, sweep.plot, server.attention("Tom", 0).plot)
    ):
        path = tmp_path / f"{number}.png"
        plot(path=path)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_asynchronous_twins_do_the_same(server):
    async def both():
        async with await vitrine.connect_async(server.url) as twin:
            return await asyncio.gather(twin.lens("Tom has 3"), twin.attention("Tom has 3", 0))

    lens, attention = asyncio.run(both())
    assert lens.tokens == attention.tokens
