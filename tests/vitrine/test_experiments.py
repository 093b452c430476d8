"""Lens, patching, sweeps and attention give the right results on the shipped model."""

from __future__ import annotations

import asyncio
from functools import partial

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import vitrine
from deployments.demo_model import WEIGHTS
from deployments.model.references import by_hooks
from deployments.places.points import Points

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


@pytest.fixture(scope="module")
def hf():
    """The shipped model in transformers."""
    return AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32).eval()


def ids_of(server, text):
    return httpx.post(f"{server.url}/tokenize", json={"prompt": text}, timeout=60).json()["tokens"]


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_a_grid_of_unequal_prompts_is_what_plain_hooks_give(server, hf, direction):
    prompts, sites = ("Tom has 3 boxes of 12", "Now Tom has 4 large boxes of 12"), ["resid", "mlp_out", "heads"]
    ask = partial(server.patch_grid, *prompts, target=TARGET, against=AGAINST, direction=direction)
    grid = ask(sites=sites, layers=[2])
    for side, prompt in enumerate(prompts):
        tokens = server.tokens(prompt)
        assert [tokens[column[side]] for column in grid.positions] == [texts[side] for texts in grid.tokens]
    way = slice(None, None, 1 if direction == "denoise" else -1)
    source, base = [ids_of(server, prompt) for prompt in prompts][way]
    target, against = (ids_of(server, token)[0] for token in (TARGET, AGAINST))
    names = ["layers.2.output", "layers.2.mlp.output", "layers.2.attention.heads"]
    resid, mlp, heads = points = [Points.learn(hf).named(name, "")[0] for name in names]
    kept = by_hooks(hf, source, points)

    def patched(point, part, at, into):
        def change(rows):
            rows[into, part] = kept[point.name][at, part]
            return rows

        logits = by_hooks(hf, base, [], {point: change})["logits"][0]
        return float(logits[target] - logits[against])

    places = [(resid, ...), (mlp, ...), *((heads, head) for head in range(heads.shape[0]))]
    want = np.array([[patched(*place, *column[way]) for column in grid.positions] for place in places])
    assert grid.rows == ["resid 2", "mlp_out 2", *(f"heads 2.{head}" for head in range(heads.shape[0]))]
    assert grid.values == pytest.approx(want, abs=0.3)  # the served model is in bfloat16
    assert np.corrcoef(grid.values.ravel(), want.ravel())[0, 1] > 0.99
    assert grid.unpatched == (grid.corrupt if direction == "denoise" else grid.clean)
    assert grid.floor <= 0.3


def test_kl_and_probability_are_of_the_next_token(server, hf):
    ask = partial(server.patch_grid, CLEAN, CORRUPT, target=TARGET, layers=[-1], positions=[-1], floor=False)
    kl = ask(metric="kl")
    assert (kl.clean, kl.values[0, 0]) == pytest.approx((0, 0), abs=0.01)  # the last output decides the answer
    with torch.no_grad():
        own, other = (
            hf(torch.tensor([ids_of(server, text)])).logits[0, -1].log_softmax(-1) for text in (CLEAN, CORRUPT)
        )
    assert kl.corrupt == pytest.approx(float((own.exp() * (own - other)).sum()), abs=0.1, rel=0.1)
    assert ask(metric="kl", direction="noise").values[0, 0] == pytest.approx(kl.corrupt, abs=0.05)
    probability = ask(metric="probability")
    assert probability.clean == pytest.approx(np.exp(ask().clean), rel=0.1)


def test_pairs_give_the_mean_and_its_interval(server):
    pairs = [(f"{name} has 3 boxes of 12", f"{name} has 4 boxes of 15", TARGET, AGAINST) for name in ("Tom", "Sam")]
    ask = partial(server.patch_grid, sites="attn_out", layers=[1, 4])
    grid, *single = ask(pairs=pairs), *(ask(own, other, target=t, against=a) for own, other, t, a in pairs)
    assert grid.values == pytest.approx(np.mean([one.values for one in single], axis=0), abs=0.1)
    low, high = grid.interval
    each = [one.changes for one in single]
    assert low == pytest.approx(np.min(each, axis=0), abs=0.1)  # of two pairs, the limits are the two
    assert high == pytest.approx(np.max(each, axis=0), abs=0.1)
    with pytest.raises(ValueError, match=r"pairs\[1\]: its tokens align otherwise"):
        ask(pairs=[pairs[0], ("Tom has 3 boxes", "Tom has 4 boxes", TARGET)])


def test_prompts_that_align_in_several_ways_need_an_alignment(server):
    ask = partial(server.patch_grid, "Tom has a box", "Tom has a a box", target=TARGET, layers=[0], floor=False)
    with pytest.raises(ValueError, match=r"align in several ways.*\n  clean: .*'Tom'"):
        ask()
    ends = [len(server.tokens(text)) - 1 for text in ask.args]
    grid = ask(align=[(0, 0), (-1, -1), (0, -1)])
    assert grid.positions == [(0, 0), (ends[0], ends[1]), (0, ends[1])]
    assert grid.tokens[0] == ("Tom", "Tom")
    assert ask(align=[(-1, -1), (0, 0)], positions=[-1]).positions == [(ends[0], ends[1])]
    with pytest.raises(IndexError, match=r"align: \[99\]"):
        ask(align=[(99, 0)])


@pytest.mark.parametrize("by", ["layer", "head", "neuron"])
def test_parts_of_a_logit_add_up_and_are_named(server, tmp_path, by):
    parts = server.attribute("Tom has 3 boxes of 12", (TARGET, AGAINST), by=by)
    lens = server.lens("Tom has 3 boxes of 12", targets=[TARGET, AGAINST], tokens="prompt_last")
    assert parts.logit == pytest.approx(lens.logprobs[-1, 0, 0] - lens.logprobs[-1, 0, 1], abs=0.1)
    assert parts.values.sum() == pytest.approx(parts.logit, abs=0.2)  # the served model is in bfloat16
    assert parts.names[0] == "embed"
    assert len(set(parts.names)) == len(parts.values)
    assert parts.top(1)[0][0] in repr(parts)
    parts.plot(path=tmp_path / "parts.png")
    assert (tmp_path / "parts.png").read_bytes().startswith(b"\x89PNG")


def test_a_target_of_several_tokens_has_no_parts(server):
    with pytest.raises(vitrine.ServerError, match="a target is one token") as refused:
        server.attribute("Tom", "boxes of pens")
    assert (refused.value.status, refused.value.param) == (400, "targets[0]")


def test_layers_and_positions_of_a_grid_may_count_from_the_end(server):
    ask = partial(server.patch_grid, "Tom has 3", "Tom has 4", target=TARGET)
    grid = ask(layers=[-1, 2], positions=np.array([-1, 0]))
    assert (grid.layers, grid.positions) == ([5, 2], [(3, 3), (0, 0)])
    assert grid.tokens == [("3", "4"), ("Tom", "Tom")]
    assert grid.values == pytest.approx(ask(layers=[5, 2], positions=[3, 0]).values, abs=0.1)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"layers": [6]}, IndexError, r"layers: \[6\] are not among \[0, 1, 2, 3, 4, 5\]"),
        ({"positions": [-5]}, IndexError, r"positions: \[-5\] are not among \[0, 1, 2, 3\]"),
        ({"sites": "embed"}, ValueError, "sites: 'embed' is not one place in each layer"),
        ({"target": None}, ValueError, "target: give the token whose logit_difference"),
        ({"direction": "denoising"}, ValueError, "direction: 'denoising' is none of denoise, noise"),
        ({"metric": "kl", "method": "attribution", "direction": "noise"}, ValueError, "the gradient of kl is 0"),
        ({"method": "attribution"}, vitrine.ServerError, "allow_client_code=true"),
    ],
)
def test_a_grid_of_places_that_are_not_there_is_refused(server, fields, error, message):
    with pytest.raises(error, match=message):
        server.patch_grid("Tom has 3", "Tom has 4", **{"target": TARGET} | fields)


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
