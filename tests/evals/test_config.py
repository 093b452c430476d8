from pathlib import Path

import pytest

from evals.options import parse_args, results_path


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--nope"], "--nope"),
        (["--sample", "3"], "--sample"),  # no abbreviations
        (["--samples", "0"], "--samples"),
        (["--parallel", "many"], "--parallel"),
        (["--base-url", "localhost:8000"], "--base-url"),
        (["--session-id", "a/b"], "--session-id"),
        (["--mode", "some"], "--mode"),
        (["--layers", "1,x", "--sites", "mlp.output", "--collect-activations"], "--layers"),
        (["--layers", "1", "--collect-activations"], "--sites"),
        (["--points", "p", "--layers", "1", "--sites", "s", "--collect-activations"], "not both"),
        (["--points", "p"], "--collect-activations"),
        (["--split", "train"], "--split"),
    ],
)
def test_a_bad_option_is_refused_by_name(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_args(argv)
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_lists_are_given_with_commas() -> None:
    config = parse_args(["--layers", "1,2", "--sites", "mlp.output, attention.output", "--collect-activations"])
    assert config.layers == (1, 2)
    assert config.sites == ("mlp.output", "attention.output")
    assert parse_args(["--layers", "all", "--sites", "a", "--collect-activations"]).layers == "all"


def test_results_lie_below_the_directory_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert results_path(None, "run") == tmp_path / "results" / "run"
    assert results_path("mine", "run") == tmp_path / "mine"
    assert results_path("/data/mine", "run") == Path("/data/mine")


def test_a_ray_jobs_results_outlive_its_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    monkeypatch.setenv("VITRINE_HOME", str(tmp_path))
    assert results_path(None, "run") == tmp_path / "results" / "run"
    assert results_path("/data/mine", "run") == Path("/data/mine")
    with pytest.raises(ValueError, match="--results-dir mine: relative to a Ray job's working directory"):
        results_path("mine", "run")
    monkeypatch.delenv("VITRINE_HOME")
    assert results_path(None, "run") == Path.home() / ".vitrine" / "results" / "run"
