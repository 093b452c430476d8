"""An evaluation of the model that ships, with what it records."""

import json
from pathlib import Path
from typing import Any

from deployments.activations import read_run
from deployments.demo_model import WEIGHTS
from deployments.model.load import revision_of
from deployments.options import Options
from evals.gsm8k.__main__ import main
from evals.labels.table import labelled
from evals.results.results import read_samples
from evals.task.records import tool_calls


def test_recorded_values_files_and_the_servers_options_come_into_the_results(served: Any, tmp_path: Path) -> None:
    results = tmp_path / "results"
    argv = ["--base-url", served.base_url, "--samples", "2", "--few-shot", "1", "--results-dir", str(results)]
    argv += ["--collect-activations", "--capture", '{"tokens": {"last": 3}}']
    assert main([*argv, "--inline-activations", "6", "--transfer-activations"]) == 0
    recorded = json.loads((results / "summary.json").read_text())["activations"]
    assert recorded["transferred"]["runs"] == recorded["runs"] >= 4
    assert recorded["statuses"] == {"stored": recorded["runs"]}
    assert list((results / recorded["transferred"]["path"]).glob("*.arrow"))
    assert (results / "report.html").exists()
    for path in (results / "samples").iterdir():
        sample = json.loads(path.read_text())
        runs = [run["run_id"] for turn in sample["turns"] for run in turn["activations"]["runs"]]
        assert list(sample["activations"]) == runs
        for points in sample["activations"].values():
            for values in points.values():
                assert (values["format"], values["shape"][0]) == ("sampled_tensor", 3)
                assert 1 <= sum(map(len, values["data"])) <= 6
    told = json.loads((results / "config.json").read_text())
    assert (told["model"]["id"], told["model"]["revision"]) == ("vitrine-demo", revision_of(str(WEIGHTS)))
    options = told["server"]["options"]
    assert Options.model_fields.keys() - options.keys() == {"api_keys_file"}
    assert (options["dtype"], options["device"], options["max_running"]) == ("float32", "cpu", 64)  # also by default
    assert told["server"]["versions"]["torch"] == told["versions"]["torch"]


def test_the_labels_of_a_real_run_name_the_tokens_of_answers_calls_and_results(served: Any, tmp_path: Path) -> None:
    results = tmp_path / "results"
    argv = ["--base-url", served.base_url, "--samples", "4", "--results-dir", str(results)]
    assert main([*argv, "--collect-activations", "--capture", '{"points": ["norm.output"]}']) == 0
    table = labelled(results)
    told = json.loads(table.schema.metadata[b"labels"])
    assert (told["why_no_spans"], told["left_out"]["answers without a stored run"]) == (None, 0)
    assert told["left_out"]["runs of earlier turns"] > 0
    samples = {sample.key: sample for sample in read_samples(results)}
    assert table.num_rows == len(samples) == 8
    for row in table.to_pylist():
        sample = samples[f"{row['problem']}.{row['mode']}.{row['variant']}"]
        run = read_run(served.home / "activations" / "_" / row["session_id"], row["run_id"])
        assert run.facts.text is not None
        assert run.text_offsets is not None
        ends = [*run.text_offsets.tolist(), len(run.facts.text)]
        spans = {name: row[f"span.{name}"] for name in ("answer", "tool_calls", "tool_results")}
        shown = {name: run.facts.text[ends[at[0]] : ends[at[1]]] for name, at in spans.items() if at}
        assert row["span.end"] == [len(run.positions) - 1, len(run.positions)]
        assert run.phases[row["span.prompt_last"][0] :][:2] == ["prompt", "generated"]
        assert shown.get("answer", "").strip() == (sample.normalized or "")
        if calls := tool_calls(sample):
            assert calls[-1]["result"] == shown["tool_results"].strip()
            assert json.loads(calls[-1]["arguments"])["expression"] in shown["tool_calls"]
    assert table["span.answer"].null_count < 8
    assert table["span.tool_calls"].null_count < 8
