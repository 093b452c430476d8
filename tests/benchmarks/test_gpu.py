"""The GPU benchmark at a size for a CPU: every section finds what it is for, and is written at once."""

from __future__ import annotations

import json

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.sections import apart
from benchmarks.gpu.speeds import VARIANTS


@pytest.fixture
def found(tmp_path, capsys):
    """Runs some sections; gives what was written, which is also what was printed."""

    def run(*names, code=0):
        only = [f"--only={name}" for name in names]
        path = tmp_path / "found.json"
        assert gpu.main(["--size=tiny", *only, "--deadline=300", f"--json={path}"]) == code
        found = json.loads(path.read_text())
        assert found["device"] == "cpu"
        printed = capsys.readouterr().out
        for title, outcome in found["sections"].items():
            assert f'"{title}"' in printed
            assert outcome.pop("seconds") >= 0
        return {title.removesuffix(", tiny"): outcome for title, outcome in found["sections"].items()}

    return run


@pytest.mark.long  # as the next: nothing that is served depends on a benchmark
def test_speeds_are_measured_beside_generate(found):
    sections = found("machine", "prefill")
    assert sections["machine"]["versions"]["torch"]
    assert set(sections["prefill"]) == {"1 x 40", "3 x 16"}
    assert all(value > 0 for cell in sections["prefill"].values() for value in cell.values())


@pytest.mark.long
def test_every_other_section_finds_what_it_is_for(found):
    sections = found("tests", "decode", "ways", "variants", "batching")
    assert "passed" in sections["tests"]["engine's tests"]["summary"]
    assert set(sections["decode"]) > {"1 x 80", "3 x mixed"}
    assert {"3 rows, all layers, served", "3 rows, 32 vectors", "3 rows, top_p and logprobs"} < set(sections["ways"])
    assert set(sections["variants"]) == {"as it is", "as it is, again", *VARIANTS}
    for name in ("ways", "variants", "batching"):
        assert all(value > 0 for cell in sections[name].values() for value in cell.values())


def test_a_section_that_fails_says_why_and_ends_nothing_else():
    plan = gpu.Plan("no such size", "cpu")
    assert "KeyError" in apart("decode", plan, 60)["error"]
    assert "deadline" in apart("decode", plan, 1)["error"]
