"""The generated page of results is the one that its files give."""

from __future__ import annotations

import json

from benchmarks.results import TARGET, rendered


def test_the_page_of_results_is_up_to_date():
    files = sorted((TARGET.parent / "results").glob("*.json"))
    assert TARGET.read_text() == rendered(files), "run python -m benchmarks.results"


def test_a_benchmark_s_rounds_are_shown_as_their_median_and_range(tmp_path):
    path = tmp_path / "benchmark-engine.json"
    case = {"tokens/s": {"engine": [500.0, 529.0, 540.0]}, "ratios": {"engine / generate": [2.03, 2.06, 2.36]}}
    path.write_text(json.dumps({"machine": {"cores": 2}, "cases": {"random-40m": case}, "failed": []}))
    page = rendered([path])
    assert "529 (500 to 540)" in page
    assert "2.06 (2.03 to 2.36)" in page
