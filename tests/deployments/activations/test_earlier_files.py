"""A session that an earlier version stored (commit 69a291a) is listed and read bit for bit.

`stored_earlier/first-steps` holds its files: two sealed ones, and one whose server was killed in its second run. The
expected content of the runs is next to it, as JSON and safetensors.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deployments.activations import load
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.segments.verify import verify
from deployments.activations.writer.recovery import recover
from deployments.points.patterns import Patterns

STORED = Path(__file__).with_name("stored_earlier")
FACTS = json.loads((STORED / "facts.json").read_text())
VALUES = load_file(STORED / "values.safetensors")


@pytest.fixture(params=["as it was left", "after a start"])
def root(request, tmp_path):
    shutil.copytree(STORED / "first-steps", tmp_path / "first-steps")
    if request.param == "after a start":
        recover(tmp_path)
    return tmp_path


def test_every_run_of_an_earlier_version_is_listed_and_read_bit_for_bit(root):
    listed = Catalogue.rebuild(root).session("first-steps")["runs"]
    assert [run["run_id"] for run in listed] == list(FACTS)
    for told in listed:
        facts, read = FACTS[told["run_id"]], {}
        assert {name: told[name] for name in ("model", "created", "tokens", "sample_id", "tags", "finish_reason")} == {
            name: facts[name] for name in ("model", "created", "tokens", "sample_id", "tags", "finish_reason")
        }
        [uri] = {point["uri"] for point in told["points"].values()}
        run = load(uri, told["run_id"], offset=told["offset"], verify=True)
        assert {name: getattr(run.facts, name) for name in facts} == facts
        read = {name: value.values if isinstance(value, Patterns) else value for name, value in run.items()}
        read |= {"position": run.positions, "token_id": run.token_ids, "text_offset": run.text_offsets}
        expected = {
            name.partition("/")[2]: value for name, value in VALUES.items() if name.startswith(f"{run.facts.run_id}/")
        }
        assert read.keys() == expected.keys()
        for name, value in expected.items():
            assert (read[name].shape, read[name].dtype) == (value.shape, value.dtype)
            assert torch.equal(read[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))


def test_files_of_an_earlier_version_verify_as_they_did_by_it(root, request):
    sealed = request.node.callspec.params["root"] == "after a start"
    found = [verify(path) for path in sorted((root / "first-steps").iterdir())]
    assert [one.state for one in found] == ["whole", "whole", "whole" if sealed else "cut short"]
    assert [(one.runs, one.unfinished) for one in found] == [(3, {}), (1, {}), (1, {} if sealed else {"run-f": 3})]
