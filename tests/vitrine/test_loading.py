"""Stored runs, from the server and from its files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openai
import pytest
import torch

import vitrine
from deployments.activations import read_run
from vitrine.connection import transport
from vitrine.runs import fetching

CAPTURE = {"points": ["layers.*.output", "layers.2.attention.heads", "layers.2.attention.k"]}


@pytest.fixture(scope="module")
def answer(server):
    """Two runs."""
    fields = {"max_tokens": 3, "temperature": 0, "session_id": "loading", "ignore_eos": True}
    return server.complete(["Ann has 3 boxes", "Tom"], capture=CAPTURE, **fields)


@pytest.fixture(scope="module")
def directory(answer) -> Path:
    uri = answer["activations_meta"]["runs"][0]["points"]["layers.0.output"]["uri"]
    return Path(uri.removeprefix("file://")).parent


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_are_those_that_the_store_holds(server, dtype):
    answer = server.complete("Ann has 3 boxes", max_tokens=2, capture=CAPTURE | {"dtype": dtype})
    (stored,) = answer["activations_meta"]["runs"]
    expected = read_run(stored["points"]["layers.0.output"]["uri"], run_id=stored["run_id"])
    for run in (vitrine.load(answer), vitrine.load(answer, server=server)):
        assert list(run) == list(expected)
        assert run.positions.tolist() == expected.positions.tolist()
        assert run.token_ids.tolist() == expected.token_ids.tolist()
        for point, rows in run.items():
            torch.testing.assert_close(torch.from_numpy(rows), expected[point].float(), rtol=0, atol=0)
        tensors = vitrine.load(answer, server=server, framework="torch")
        for point, values in tensors.items():
            torch.testing.assert_close(values, expected[point], rtol=0, atol=0)


def test_every_name_of_a_run_leads_to_it(server, answer, directory):
    first = answer["activations_meta"]["runs"][0]
    name, file = first["run_id"], first["points"]["layers.0.output"]["uri"]
    expected = vitrine.load(first)["layers.3.output"]
    runs = [vitrine.load(source, run_id=name) for source in (answer, directory, str(directory), file)]
    runs += [vitrine.load(source, run_id=name, server=server) for source in (answer, first, name, "loading")]
    for run in runs:
        np.testing.assert_array_equal(run["layers.3.output"], expected)


def test_an_answer_of_openais_client_is_loaded(served, server):
    with openai.OpenAI(base_url=served.base_url, api_key="unused") as client:
        asked = {"model": "vitrine-demo", "prompt": "Ann", "max_tokens": 2}
        answer = client.completions.create(**asked, extra_body={"capture": CAPTURE})
    assert (
        vitrine.load(answer, "layers.*.output").keys() == vitrine.load(answer, "layers.*.output", server=server).keys()
    )


def test_a_stack_has_the_order_that_was_asked_for(server, answer, directory):
    ids = [run["run_id"] for run in answer["activations_meta"]["runs"]][::-1]
    points = ["layers.4.output", "layers.*.output"]
    for source in (server, directory):
        stack = vitrine.load_stack(source, ids, points, tokens="prompt_last")
        assert stack.shape == (2, 6, 192)
        for row, name in zip(stack, ids, strict=True):
            run = vitrine.load(name, server=server)
            place = run.facts["prompt_tokens"] - 1
            np.testing.assert_array_equal(row[0], run["layers.4.output"][place])
            np.testing.assert_array_equal(row[1], run["layers.0.output"][place])


@pytest.mark.parametrize(("tokens", "place"), [("last", -1), ("generated_last", -1), (1, 1)])
def test_a_stack_is_of_the_token_that_is_named(answer, directory, tokens, place):
    name = answer["activations_meta"]["runs"][0]["run_id"]
    stack = vitrine.load_stack(directory, [name], "layers.-1.output", tokens=tokens)
    np.testing.assert_array_equal(stack[0, 0], vitrine.load(directory, run_id=name)["layers.5.output"][place])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (None, "say which by tokens"),
        (99, "99 is none of them"),
        ("first", "not one row of each run"),
        ({"text": "has"}, "not one row of each run"),
    ],
)
def test_a_stack_needs_one_row_of_each_run(answer, directory, tokens, message):
    ids = [run["run_id"] for run in answer["activations_meta"]["runs"]]
    with pytest.raises(ValueError, match=message):
        vitrine.load_stack(directory, ids, "layers.1.output", tokens=tokens)


def test_what_is_not_there_is_named(server, answer, directory, tmp_path):
    with pytest.raises(LookupError, match="no run or session nothing"):
        vitrine.load("nothing", server=server)
    with pytest.raises(LookupError, match="no run nothing"):
        vitrine.load_stack(directory, ["nothing"])
    with pytest.raises(LookupError, match=r"'layers.7.output' is none of the recorded points layers.0.output"):
        vitrine.load_runs(answer, "layers.7.output")
    with pytest.raises(LookupError, match=r"'layers.7.output' is none of the recorded points layers.0.output"):
        vitrine.load_runs(answer, "layers.7.output", server=server)
    with pytest.raises(FileNotFoundError, match="give server="):
        vitrine.load("run-1-0")
    with pytest.raises(FileNotFoundError, match="holds no Arrow file"):
        vitrine.load(tmp_path)
    with pytest.raises(ValueError, match="has 2 runs: give one of them as run_id"):
        vitrine.load(answer)
    with pytest.raises(ValueError, match="recorded no activations"):
        vitrine.load({"choices": []})


@pytest.mark.parametrize("few", [True, False])
def test_some_runs_of_a_file_are_fetched_by_their_bytes(server, monkeypatch, few):
    prompts = [f"Ann has {number} boxes" for number in range(6)]
    asked = server.complete(prompts, max_tokens=0, session_id="some-of-them", capture={"points": ["layers.*.output"]})
    stored = asked["activations_meta"]["runs"]
    if few:  # bytes in an answer
        monkeypatch.setattr(transport, "PAGE_BYTES", 5000)
        monkeypatch.setattr(fetching, "HEAD_BYTES", 100)
    for places in ([3], [4, 1, 2], [0, 5], range(6)):
        chosen = [stored[place] for place in places]
        fetched = server.load_runs([run["run_id"] for run in chosen], "layers.1.output")
        expected = vitrine.load_runs(chosen, "layers.1.output")
        assert [run.run_id for run in fetched] == [run["run_id"] for run in chosen]
        for run, its in zip(fetched, expected, strict=True):
            assert (run["layers.1.output"] == its["layers.1.output"]).all()
            assert (run.positions.tolist(), run.facts) == (its.positions.tolist(), its.facts)


def test_a_point_of_a_run_goes_by_any_of_its_names(directory):
    run = vitrine.load_runs(directory)[0]
    names = ("layers.1.output", "layers[1].output", "blocks.1.hook_resid_post", f"layers.{1 - run._layers}.output")
    assert all((run[name] == run["layers.1.output"]).all() for name in names)
    with pytest.raises(KeyError, match=r"'layers.\*.output' is not a point of run-"):
        run["layers.*.output"]


def test_a_directorys_runs_come_in_the_order_of_requests(server):
    prompts = ["Ann has" + " 3 boxes" * (40 - number) for number in range(40)]  # short ones end first
    answer = server.complete(prompts, max_tokens=1, session_id="in-order", capture={"points": ["norm.output"]})
    stored = answer["activations_meta"]["runs"]
    directory = stored[0]["points"]["norm.output"]["uri"].rpartition("/")[0]
    expected = [run["run_id"] for run in stored]
    assert [run.run_id for run in vitrine.load_runs(directory)] == expected
    assert [run.run_id for run in server.load_runs("in-order")] == expected


def test_what_stored_nothing_says_so(server):
    inline = server.complete("Ann has", max_tokens=0, capture={"points": ["norm.output"], "return": "inline"})
    with pytest.raises(ValueError, match="capture's return is inline"):
        vitrine.load(inline)
    failed = {"activations_meta": {"status": "failed", "reason": "the disk is full", "runs": [{"run_id": "a"}]}}
    with pytest.raises(ValueError, match="the disk is full"):
        vitrine.load(failed)
    with pytest.raises(ValueError, match="'a' is not stored: the disk is full"):
        vitrine.load({"run_id": "a", "status": "failed", "reason": "the disk is full", "points": {}})


def test_an_answer_without_files_is_loaded_from_the_server(server):
    asked = {"points": ["norm.output"], "return": "id"}
    answer = server.complete("Ann has", max_tokens=0, capture=asked)
    assert list(vitrine.load(answer, server=server)) == ["norm.output"]
    with pytest.raises(ValueError, match="names no files.*give server="):
        vitrine.load(answer)
