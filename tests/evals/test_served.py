"""An evaluation of the model that ships, with what it records."""

import json
from pathlib import Path
from typing import Any

from deployments.demo_model import WEIGHTS
from deployments.engine.revision import revision_of
from deployments.options import Options
from evals.gsm8k import main


def test_recorded_values_come_into_the_samples_and_the_files_into_the_results(served: Any, tmp_path: Path) -> None:
    results = tmp_path / "results"
    argv = ["--base-url", served.base_url, "--samples", "2", "--few-shot", "1", "--results-dir", str(results)]
    argv += ["--collect-activations", "--tokens", "last:3", "--session-id", "evaluated"]
    assert main([*argv, "--inline-activations", "6", "--transfer-activations"]) == 0
    recorded = json.loads((results / "summary.json").read_text())["activations"]
    assert recorded["transferred"]["runs"] == recorded["runs"] >= 4
    assert recorded["statuses"] == {"stored": recorded["runs"]}
    assert list((results / recorded["transferred"]["path"]).glob("*.arrow"))
    assert (results / "activation_stats.json").exists()
    assert (results / "report.html").exists()
    for path in (results / "samples").iterdir():
        sample = json.loads(path.read_text())
        runs = [run["run_id"] for turn in sample["turns"] for run in turn["activations"]["runs"]]
        assert list(sample["activations"]) == runs
        for points in sample["activations"].values():
            for values in points.values():
                assert (values["format"], values["shape"][0]) == ("sampled", 3)
                assert 1 <= sum(map(len, values["data"])) <= 6


def test_config_json_has_the_models_structure_and_the_servers_health(served: Any, tmp_path: Path) -> None:
    results = tmp_path / "results"
    argv = ["--base-url", served.base_url, "--samples", "1", "--mode", "no-tools", "--results-dir", str(results)]
    assert main(argv) == 0
    told = json.loads((results / "config.json").read_text())
    assert told["model"]["id"] == "vitrine-demo"
    assert told["model"]["structure"]
    assert told["server"]["health"]["loaded_models"] == ["vitrine-demo"]
    assert told["server"]["info"]
    assert told["model"]["revision"] == revision_of(str(WEIGHTS))
    options = told["server"]["options"]
    assert Options.model_fields.keys() - options.keys() == {"api_keys_file"}
    assert (options["dtype"], options["device"], options["max_running"]) == (
        "float32",
        "cpu",
        64,
    )  # those by default, too
    assert told["server"]["versions"]["torch"] == told["versions"]["torch"]
