"""Fitted lenses over HTTP: installed, listed, read through in shared batches, rejected by field."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from safetensors.torch import save

from deployments.activations import read_run
from tests.serve_app.completions import MODEL, POINT, WIDTH, post, refused

LAYERS = (0, 2)
LENS = {"layers": [0, 1, 2, -1], "top_k": 5, "tokens": "prompt_last"}


def install(served, name: str, tensors: dict[str, torch.Tensor], **spec) -> httpx.Response:
    form = {"spec": json.dumps({"name": name, "model": MODEL, "kind": "tuned", **spec})}
    return httpx.post(f"{served.root}/v1/lenses", files={"file": ("l.safetensors", save(tensors))}, data=form)


def read(served, **lens) -> list[list[tuple[int, float]]]:
    """The top tokens of each layer after the prompt."""
    answer = post(served, max_tokens=0, logit_lens=LENS | lens)
    assert answer.status_code == 200, answer.text
    (entry,) = answer.json()["choices"][0]["logit_lens"]["prompt"]
    return [[(top["token_id"], top["logprob"]) for top in layer["top"]] for layer in entry["layers"]]


@pytest.fixture(scope="module")
def last(served):
    """A lens that maps every row of layers 0 and 2 to the last layer's after the prompt."""
    capture = {"points": ["layers.5.output"], "tokens": "prompt_last", "mode": "trace", "return": "reference"}
    stored = read_run(post(served, capture=capture).json()["activations_meta"]["runs"][0]["run_id"])
    maps = {f"layers.{layer}.weight": torch.zeros(WIDTH, WIDTH) for layer in LAYERS}
    maps |= {f"layers.{layer}.bias": stored["layers.5.output"][0].clone() for layer in LAYERS}
    answer = install(served, "last", maps, card={"tokens": 7})
    assert answer.status_code == 200, answer.text
    yield answer.json()
    assert httpx.delete(f"{served.root}/v1/lenses/last").json()["deleted"]
    assert httpx.get(f"{served.root}/v1/lenses/last").status_code == 404


def test_a_lens_is_listed_with_its_card(served, last):
    assert last["layers"] == list(LAYERS)
    assert last["card"] == {"tokens": 7}
    assert httpx.get(f"{served.root}/v1/lenses/last").json() == last
    assert httpx.get(f"{served.root}/v1/lenses").json()["data"] == [last]
    taken = install(served, "last", {"layers.0.weight": torch.eye(WIDTH)})
    assert refused(taken) == (400, "spec.name", "lens_exists")


def test_layers_with_a_map_are_read_through_it_beside_plain_ones_in_one_batch(served, last):
    plain = read(served)
    with ThreadPoolExecutor() as pool:
        asked = list(pool.map(lambda lens: read(served, **lens), [{"lens": "last"}, {}] * 4))
    for i, found in enumerate(asked):
        want = plain if i % 2 else [plain[3], plain[1], plain[3], plain[3]]
        for got, wanted in zip(found, want, strict=True):
            assert [token for token, _ in got] == [token for token, _ in wanted]
            assert [value for _, value in got] == pytest.approx([value for _, value in wanted], abs=1e-3)


def test_generated_tokens_are_read_through_it_and_the_stored_run_names_it(served, last):
    lens = {"layers": [0], "top_k": 1, "lens": "last"}
    answer = post(served, max_tokens=4, logit_lens=lens, capture={"points": [POINT], "return": "reference"}).json()
    read = answer["choices"][0]["logit_lens"]["content"]
    (first, *rest) = [entry["layers"][0]["top"][0]["token_id"] for entry in read]
    assert rest == [first] * 3, "the map is constant"
    assert read_run(answer["activations_meta"]["runs"][0]["run_id"]).facts.logit_lens == lens


def test_unknown_lenses_and_those_of_other_models_get_400_with_the_installed_names(served, last):
    other = {"layers.0.weight": torch.eye(8)}
    assert install(served, "other", other, model="another").status_code == 200
    for name in ("other", "none"):
        answer = post(served, logit_lens={"lens": name})
        assert refused(answer) == (400, "logit_lens.lens", "lens_not_found")
        assert "last" in answer.json()["error"]["message"]
    httpx.delete(f"{served.root}/v1/lenses/other")


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("layers.0.weight", torch.eye(8)),
        ("layers.5.weight", torch.eye(WIDTH)),  # the last layer has no map
        ("layers.0.bias", torch.zeros(WIDTH)),
        ("encoder", torch.eye(WIDTH)),
    ],
)
def test_tensors_that_do_not_fit_are_refused(served, name, tensor):
    assert refused(install(served, "wrong", {name: tensor}))[:2] == (400, "file")
    assert httpx.get(f"{served.root}/v1/lenses/wrong").status_code == 404
