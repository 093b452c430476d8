"""Interventions over HTTP: they change the steered request alone, and its run records them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from safetensors.torch import save

from deployments.activations import read_run
from tests.serve_app.completions import POINT, STEER, WIDTH, post, refused, text


def test_a_steered_answer_is_another_and_those_beside_it_are_not(served):
    plain = text(served)
    steered = text(served, interventions=[STEER])
    assert steered != plain
    with ThreadPoolExecutor(16) as pool:
        asked = [{}, {"interventions": [STEER]}] * 8
        answers = list(pool.map(lambda fields: text(served, **fields), asked))
    assert answers == [plain, steered] * 8


def test_no_interventions_are_the_baseline(served):
    assert text(served, interventions=[]) == text(served)


def test_a_run_holds_values_after_the_change_and_the_change_itself(served):
    asked = [{"op": "zero", "point": POINT, "tokens": "generated"}, STEER | {"tokens": {"positions": [0]}}]
    capture = {"points": [POINT, "layers.2.output"], "tokens": "all"}
    answer = post(served, interventions=asked, capture=capture, session_id="interventions").json()
    (run,) = answer["activations_meta"]["runs"]
    stored = read_run(run["points"][POINT]["uri"], run_id=run["run_id"])
    assert stored.facts.interventions == asked
    values = stored[POINT]
    assert (values[run["prompt_tokens"] :] == 0).all()
    assert (values[: run["prompt_tokens"]] != 0).any(dim=1).all()
    plain = post(served, capture=capture, session_id="interventions").json()["activations_meta"]["runs"][0]
    before = read_run(plain["points"][POINT]["uri"], run_id=plain["run_id"])[POINT]
    moved = values[0] - before[0]
    assert moved.tolist() == pytest.approx([5 * number for number in STEER["vector"]], abs=1e-3)


def test_values_that_are_not_finite_are_null(served):
    row = {"point": "layers.5.output", "tokens": {"positions": [1]}}
    changes = [{"op": "scale", "factor": 3e38} | row, STEER | {"unit": "residual_norm"} | row]
    capture = {"points": [row["point"]], "return": "inline", "tokens": row["tokens"]}
    answer = post(served, interventions=changes, report=True, capture=capture)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["norms"][0]["norm"] is None
    assert choice["report"][0]["largest_change"] is None
    assert None in answer.json()["activations_meta"]["runs"][0]["points"][row["point"]]["data"][0]


def test_a_vector_may_be_a_tensor_that_was_sent_before(served):
    sent = save({"direction": torch.tensor(STEER["vector"]), "other": torch.zeros(3)})
    answer = httpx.post(
        f"{served.base_url}/tensors", content=sent, headers={"content-type": "application/octet-stream"}, timeout=60
    )
    reference = answer.json()["id"]
    by_id = [STEER | {"vector": f"{reference}/direction"}]
    assert text(served, interventions=by_id) == text(served, interventions=[STEER])
    for unfit in (reference, f"{reference}/nothing", f"{reference}/other"):
        answer = post(served, interventions=[STEER | {"vector": unfit}])
        assert refused(answer)[:2] == (400, "interventions[0].vector"), unfit


def recorded(served, **fields):
    """What a request recorded of two layers and the logits, and its run's id."""
    capture = {"points": ["layers.*.output", "lm_head.output"]}
    answer = post(served, capture=capture, session_id="patching", **fields)
    assert answer.status_code == 200, answer.text
    (run,) = answer.json()["activations_meta"]["runs"]
    return read_run(run["points"][POINT]["uri"], run_id=run["run_id"]), run["run_id"]


def test_a_stored_runs_rows_take_the_place_of_another_requests(served):
    clean, run_id = recorded(served)
    corrupted = {"prompt": "Tom has 3 bags of 4 pens."}  # as many tokens
    assert recorded(served, **corrupted)[0].facts.prompt_tokens == clean.facts.prompt_tokens
    into_itself, _ = recorded(served, interventions=[{"op": "replace", "point": POINT, "from": {"run_id": run_id}}])
    for point in clean:
        assert torch.equal(into_itself[point], clean[point]), point
    whole = {"op": "replace", "point": "layers.*.output", "tokens": "prompt"}
    whole |= {"from": {"run_id": run_id, "tokens": "prompt"}}
    patched, _ = recorded(served, **corrupted, interventions=[whole])
    assert patched.facts.interventions == [whole]
    prompt = slice(clean.facts.prompt_tokens)
    assert torch.equal(patched["lm_head.output"][prompt], clean["lm_head.output"][prompt])
    httpx.delete(f"{served.base_url}/activations/session/patching", timeout=60)
    gone = post(served, interventions=[whole])
    assert refused(gone)[1:] == ("interventions[0].from.run_id", "run_not_found")


TURN = {"op": "rotate", "point": POINT, "features": {"first": 2}, "angle": 9}
BAD = [
    ({"op": "twist", "point": POINT}, "interventions[0]"),
    ({"op": "zero", "point": "layers.99.output"}, "interventions[0].point"),
    ({"op": "zero", "point": "layers.1.outputt"}, "interventions[0].point"),
    ({"op": "zero", "point": POINT, "vector": [1]}, "interventions[0].vector"),
    ({"op": "add", "point": POINT}, "interventions[0].vector"),
    ({"op": "add", "point": POINT, "vector": [1.0, 2.0]}, "interventions[0].vector"),
    ({"op": "add", "point": POINT, "vector": ["1"] * WIDTH}, "interventions[0].vector[0]"),
    ({"op": "add", "point": POINT, "vector": [1e39] * WIDTH}, "interventions[0].vector[0]"),
    ({"op": "add", "point": POINT, "vector": [1e38] * WIDTH, "scale": 1e38}, "interventions[0].scale"),
    ({"op": "project_out", "point": POINT, "vector": [0.0] * WIDTH}, "interventions[0].vector"),
    ({"op": "add", "point": POINT, "vector": "tensor-of-nobody"}, "interventions[0].vector"),
    ({"op": "add", "point": POINT, "vector": "../../etc/passwd"}, "interventions[0].vector"),
    ({"op": "clamp", "point": POINT}, "interventions[0]"),
    ({"op": "clamp", "point": POINT, "min": 2, "max": 1}, "interventions[0]"),
    ({"op": "clamp_projection", "point": POINT, "vector": [1.0] * WIDTH}, "interventions[0]"),
    (TURN | {"vector": [1.0, 3.0], "toward": [-2.0, -6.0]}, "interventions[0].toward"),
    (TURN | {"vector": [1.0, 3.0], "toward": [0.0, 0.0]}, "interventions[0].toward"),
    ({"op": "clamp_projection", "point": POINT, "vector": [0.0] * WIDTH, "max": 1}, "interventions[0].vector"),
    ({"op": "ablate", "point": POINT, "vector": [1.0] * WIDTH}, "interventions[0].mean"),
    ({"op": "ablate", "point": POINT, "mean": [1.0, 2.0]}, "interventions[0].mean"),
    (STEER | {"unit": "absolute", "relative": True}, "interventions[0]"),
    ({"op": "replace", "point": POINT, "vector": [1.0] * WIDTH, "alpha": 1.5}, "interventions[0].alpha"),
    ({"op": "zero", "point": POINT, "tokens": {"positions": [5000]}}, "interventions[0].tokens"),
    ({"op": "zero", "point": POINT, "tokens": {"prompt_last": 500}}, "interventions[0].tokens"),
    ({"op": "zero", "point": POINT, "features": {"index": [WIDTH]}}, "interventions[0].features"),
    ({"op": "zero", "point": POINT, "heads": [0]}, "interventions[0].heads"),
    ({"op": "zero", "point": "layers.1.attention.heads", "heads": [99]}, "interventions[0].heads"),
    ({"op": "replace", "point": POINT}, "interventions[0]"),
    ({"op": "replace", "point": POINT, "vector": [1.0], "from": {"run_id": "x"}}, "interventions[0]"),
    ({"op": "replace", "point": POINT, "from": {}}, "interventions[0].from.run_id"),
    ({"op": "replace", "point": POINT, "from": {"run_id": "run-none-0"}}, "interventions[0].from.run_id"),
    ({"op": "replace", "point": POINT, "from": {"run_id": "x", "run": "y"}}, "interventions[0].from.run"),
    ({"op": "replace", "point": POINT, "from": {"run_id": "x", "tokens": "few"}}, "interventions[0].from.tokens"),
    ({"op": "add", "point": POINT, "vector": [1.0], "from": {"run_id": "x"}}, "interventions[0].from"),
]


@pytest.mark.parametrize(("bad", "param"), BAD, ids=[f"{i} {bad['op']}" for i, (bad, _) in enumerate(BAD)])
def test_what_cannot_be_is_refused_by_its_path_and_nothing_runs(served, statistics, bad, param):
    before = statistics()["steps"]
    assert refused(post(served, interventions=[bad]))[:2] == (400, param)
    assert statistics()["steps"] == before
